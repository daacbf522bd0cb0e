"""Preference pairs: every shape they come in, errors with file and line, and the set that ships with segrew."""

import itertools
import json
from collections import Counter

import pytest

from segrew.preferences import (
    Fault,
    everyday_pairs,
    load_preferences,
)

USER = {"role": "user", "content": "What colour is the sky?"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD, BAD = "It is blue.", "It is green."


def says(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def write(tmp_path):
    def run(*rows, name="pairs.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return run


SHAPES = {
    "standard": ([USER], {"prompt": USER["content"], "chosen": GOOD, "rejected": BAD}),
    "messages and text": ([SYSTEM, USER], {"prompt": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD}),
    "conversational": ([USER], {"prompt": [USER], "chosen": [says(GOOD)], "rejected": [says(BAD)]}),
    "conversational, prompt implicit": ([SYSTEM, USER], {"chosen": [SYSTEM, USER, says(GOOD)],
                                                        "rejected": [SYSTEM, USER, says(BAD)]}),
    "text prompt, conversational answers": ([USER], {"prompt": USER["content"], "chosen": [says(GOOD)],
                                                     "rejected": [says(BAD)]}),
    "prompt repeated in the answers": ([USER], {"prompt": USER["content"], "chosen": [USER, says(GOOD)],
                                                "rejected": [USER, says(BAD)]}),
    "prompt repeated with other white space": ([USER], {"prompt": f" {USER['content']}\n",
                                                        "chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)]}),
    "last question of whole conversations": ([SYSTEM, USER], {"prompt": USER["content"],
                                                              "chosen": [SYSTEM, USER, says(GOOD)],
                                                              "rejected": [SYSTEM, USER, says(BAD)]}),
    "prompt null, conversational": ([SYSTEM, USER], {"prompt": None, "chosen": [SYSTEM, USER, says(GOOD)],
                                                     "rejected": [SYSTEM, USER, says(BAD)]}),
    "prompt implicit, whole texts": ([], {"chosen": GOOD, "rejected": BAD}),
    "several turns": ([USER, says("Why?"), USER], {"prompt": [USER], "chosen": [says("Why?"), USER, says(GOOD)],
                                                   "rejected": [says("Why?"), USER, says(BAD)]}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_trl_gives_the_same_pair(write, shape):
    prompt, row = SHAPES[shape]
    (pair,) = load_preferences(write(row | {"id": 7, "score": 3})).pairs
    assert (pair.prompt, pair.chosen, pair.rejected, pair.id) == (prompt, GOOD, BAD, "7")


def test_rows_without_a_usable_pair_are_counted_by_reason(write):
    good = {"prompt": "x", "chosen": "a", "rejected": "b"}
    loaded = load_preferences(
        write(
            good,
            good | {"rejected": "a"},
            good | {"chosen": " \n"},
            good | {"rejected": None},
            good | {"prompt": None},
            {"chosen": [USER, says("a")], "rejected": [says("x"), says("b")]},
            {"chosen": [USER, says("a")], "rejected": [USER, says("a")]},
            {"prompt": [{"role": "user", "content": None}], "chosen": "a", "rejected": "b"},
            {"prompt": "x", "chosen": [], "rejected": []},
        )
    )
    assert len(loaded.pairs) == 1
    assert loaded.skipped == Counter(
        {"identical answers": 2, "empty answer": 2, "no common prompt": 2, "no prompt": 1, "no text in the prompt": 1}
    )


def test_identical_answers_are_no_pair(write):
    path = write({"prompt": "x", "chosen": "a", "rejected": "a"})
    with pytest.raises(ValueError, match=r"0 of 1 rows are usable pairs \(1 identical answers\)"):
        load_preferences(path)


def test_subsets_and_faults_come_along(write):
    marks = [{"start": 6, "end": 11, "kind": "wrong_fact"}]
    row = {"prompt": "x", "chosen": GOOD, "rejected": BAD, "subset": "colours", "faults": marks}
    (pair,) = load_preferences(write(row)).pairs
    assert pair.subset == "colours" and pair.faults == (Fault(6, 11, "wrong_fact"),)
    assert BAD[6:11] == "green"


@pytest.mark.parametrize(
    "marks",
    [
        [{"start": 0, "end": 13, "kind": "x"}],
        [{"start": 5, "end": 5, "kind": "x"}],
        [{"start": -1, "end": 2, "kind": "x"}],
        [{"start": "0", "end": "2", "kind": "x"}],
        [{"start": 0, "kind": "x"}],
        ["wrong"],
        7,
    ],
)
def test_faults_outside_the_answer_name_their_line(write, marks):
    good = {"prompt": "x", "chosen": GOOD, "rejected": BAD}
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 2: column 'faults'"):
        load_preferences(write(good, good | {"faults": marks}))


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "x", "chosen": "a"}, r"no column 'rejected' \(found: chosen, prompt\)"),
        ({"prompt": "x", "answer": "a"}, r"no column 'chosen' \(found: answer, prompt\)"),
        ({"prompt": 5, "chosen": "a", "rejected": "b"}, "column 'prompt' is neither text nor a list"),
        ({"prompt": "x", "chosen": ["a"], "rejected": ["b"]}, "column 'chosen' is neither"),
        ({"prompt": "x", "chosen": [{"role": "assistant"}], "rejected": [says("b")]}, "column 'chosen' is neither"),
    ],
)
def test_rows_of_another_shape_name_file_and_line(write, row, message):
    good = {"prompt": "x", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 3: {message}"):
        load_preferences(write(good, good, row))


def test_a_name_that_is_neither_file_nor_data_set_is_said_so():
    with pytest.raises(ValueError, match="'nobody/nothing' is no local file"):
        load_preferences("nobody/nothing")


def test_b17_null_empty_extra_and_repeated(write):
    good = {"prompt": "x", "chosen": "a", "rejected": "b", "id": 7}
    bad = [
        good | {"rejected": None},
        good | {"rejected": ""},
        good | {"chosen": "   "},
        good | {"prompt": None},
        good | {"prompt": " \n"},
        {"prompt": [{"role": "user", "content": None}], "chosen": [says("a")], "rejected": [says("b")]},
    ]
    loaded = load_preferences(write(good, *bad, good | {"meta": {"a": 1}, "other": None, "rate": 0.5}, good))
    assert [pair.id for pair in loaded.pairs] == ["7", "7", "7"]
    assert loaded.skipped == {"empty answer": 3, "no prompt": 1, "no text in the prompt": 2}
    with pytest.raises(ValueError, match=r"0 of 6 rows are usable pairs \(3 empty answer, 1 no prompt, 2 no text"):
        load_preferences(write(*bad))


def test_the_implicit_prompt_is_what_messages_have_in_common_not_characters(write):
    (pair,) = load_preferences(write({"chosen": "The sky is blue.", "rejected": "The sky is green."})).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == ([], "The sky is blue.", "The sky is green.")
    rows = [
        {"chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)]},
        {"chosen": [USER, says("a"), USER, says("c")], "rejected": [USER, says("b"), USER, says("c")]},
        {"chosen": [USER, says("a"), USER], "rejected": [USER, says("a"), SYSTEM]},
        {"chosen": [SYSTEM, says("a")], "rejected": [USER, says("a")]},
    ]
    loaded = load_preferences(write(*rows))
    assert [pair.chosen for pair in loaded.pairs] == [GOOD]
    assert loaded.skipped == {
        "conversations part before the last message": 1, "last message is not the assistant's": 1, "no common prompt": 1
    }  # fmt: skip


def test_a_prompt_of_another_name_is_not_passed_over(write):
    for name in ("question", "instruction", "conversations"):
        with pytest.raises(ValueError, match=rf"line 1: no column 'prompt', so .* if '{name}' is the prompt"):
            load_preferences(write({name: "x", "chosen": "a", "rejected": "b"}))


TOOL = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "weather"}}]}
RESULT = {"role": "tool", "name": "weather", "content": "rain"}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_and_tool_messages_come_along(write, tools):
    turns = [USER, CALL, RESULT]
    row = {"chosen": [*turns, says("Rain.")], "rejected": [*turns, says("Sun.")], "tools": tools}
    (pair,) = load_preferences(write(row | {"chat_template_kwargs": {"enable_thinking": False}})).pairs
    assert pair.prompt == turns and pair.template == {"enable_thinking": False, "tools": [TOOL]}
    filled = [message | {"tool_calls": message.get("tool_calls"), "name": message.get("name")} for message in turns]
    (same,) = load_preferences(write({"prompt": filled, "chosen": "Rain.", "rejected": "Sun."})).pairs
    assert same.prompt == turns  # what the hub fills in with null is not there


@pytest.mark.parametrize("column, value", [("tools", "not json"), ("tools", {"a": 1}), ("chat_template_kwargs", [1])])
def test_template_arguments_of_another_kind_name_their_line(write, column, value):
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 1: 'tools'"):
        load_preferences(write({"prompt": "x", "chosen": "a", "rejected": "b", column: value}))


def test_margins_come_along(write):
    rows = [{"prompt": "x", "chosen": "a", "rejected": "b", "margin": margin} for margin in (1.5, 0, None, "2")]
    assert [pair.margin for pair in load_preferences(write(*rows)).pairs] == [1.5, 0.0, None, 2.0]
    for bad in ("much", [1], float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"line 2: column 'margin'"):
            load_preferences(write(rows[0], rows[0] | {"margin": bad}))


IDS = {"prompt_ids": [5, 6], "chosen_ids": [7, 2], "rejected_ids": [8, 2]}


@pytest.mark.parametrize("names", ["{}_ids", "{}_input_ids"])
def test_token_ids_in_place_of_texts(write, names):
    row = {names.format(part): IDS[f"{part}_ids"] for part in ("prompt", "chosen", "rejected")}
    same = row | {names.format("rejected"): [7, 2]}
    loaded = load_preferences(write(row, same, row | {names.format("chosen"): []}))
    assert [pair.ids for pair in loaded.pairs] == [([5, 6], [7, 2], [8, 2])]
    assert loaded.skipped == {"identical answers": 1, "empty answer": 1}


@pytest.mark.parametrize(
    "change", [{"prompt_ids": None}, {"chosen_ids": ["a"]}, {"rejected_ids": [-1]}, {"chosen_ids": 7}]
)
def test_ids_that_are_none_name_their_line(write, change):
    with pytest.raises(ValueError, match=r"line 1: a pre-tokenised row needs prompt_ids, chosen_ids, rejected_ids"):
        load_preferences(write(IDS | change))


KINDS = {"wrong_fact", "ignored_constraint", "rude", "repetitive", "needless_refusal", "unsafe_advice"}
CATEGORIES = {"facts", "how-to", "code", "rewriting", "advice", "multi-turn", "system-prompt", "refusals"}
TRAIN, TEST = everyday_pairs("train"), everyday_pairs("test")


def test_the_embedded_set_has_280_and_120_pairs_of_eight_categories():
    assert (len(TRAIN), len(TEST)) == (280, 120)
    assert len({pair.id for pair in TRAIN + TEST}) == 400
    counts = Counter(pair.subset for pair in TRAIN + TEST)
    assert set(counts) == CATEGORIES and min(counts.values()) >= 40
    assert {pair.subset for pair in TEST} == CATEGORIES
    with pytest.raises(ValueError, match="the splits 'train' and 'test', not 'validation'"):
        everyday_pairs("validation")


def test_no_prompt_is_in_both_splits_and_nothing_is_there_twice():
    prompts = [json.dumps(pair.prompt) for pair in TRAIN + TEST]
    assert len(set(prompts)) == 400
    answers = [text for pair in TRAIN + TEST for text in (pair.chosen, pair.rejected)]
    assert len(set(answers)) == 800
    lasts = [pair.prompt[-1]["content"].strip().lower() for pair in TRAIN + TEST]
    assert not set(lasts[:280]) & set(lasts[280:])


def test_prompts_are_conversations_that_the_assistant_answers_next():
    for pair in TRAIN + TEST:
        roles = [message["role"] for message in pair.prompt]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], pair.id
        assert all(message["content"].strip() == message["content"] != "" for message in pair.prompt), pair.id
        assert pair.chosen.strip() == pair.chosen != "" and pair.rejected.strip() == pair.rejected != "", pair.id
        assert len(turns) > 1 or pair.subset != "multi-turn", pair.id
        assert roles[0] == "system" or pair.subset != "system-prompt", pair.id


def test_faults_are_marked_in_the_rejected_answer_and_are_of_known_kinds():
    for pair in TRAIN + TEST:
        assert 1 <= len(pair.faults) <= 2, pair.id
        for fault in pair.faults:
            assert 0 <= fault.start < fault.end <= len(pair.rejected), pair.id
            marked = pair.rejected[fault.start : fault.end]
            assert marked.strip() == marked and fault.kind in KINDS, pair.id
        spans = sorted((fault.start, fault.end) for fault in pair.faults)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans)), pair.id
    assert {fault.kind for pair in TEST for fault in pair.faults} == KINDS


@pytest.mark.parametrize("pairs", [TRAIN, TEST], ids=["train", "test"])
def test_the_longer_answer_is_the_better_one_about_half_the_time(pairs):
    longer = sum(len(pair.chosen) > len(pair.rejected) for pair in pairs) / len(pairs)
    assert 0.45 <= longer <= 0.55


def test_wordings_vary():
    openings = Counter(" ".join(pair.rejected.split()[:3]) for pair in TRAIN + TEST)
    assert openings.most_common(1)[0][1] <= 12
    marked = [pair.rejected[f.start : f.end] for pair in TRAIN + TEST for f in pair.faults]
    assert len(set(marked)) == len(marked)
