"""Preference pairs: every shape they come in, errors with file and line, and the set that ships with segrew."""

import gzip
import itertools
import json
from collections import Counter

import pytest

from segrew.chat import ChatFormat
from segrew.preferences import (
    Fault,
    PreferencePair,
    encode_pair,
    everyday_pairs,
    load_preferences,
    read_records,
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
            {"chosen": "whole text", "rejected": "another"},
            {"chosen": [USER, says("a")], "rejected": [says("x"), says("b")]},
            {"chosen": [USER, says("a")], "rejected": [USER, says("a")]},
            {"prompt": [{"role": "user", "content": None}], "chosen": "a", "rejected": "b"},
            {"prompt": "x", "chosen": [], "rejected": []},
        )
    )
    assert len(loaded.pairs) == 1
    assert loaded.skipped == Counter({"identical answers": 2, "empty answer": 2, "no common prompt": 5})


def test_identical_answers_are_kept_for_an_evaluation_that_counts_ties(write):
    path = write({"prompt": "x", "chosen": "a", "rejected": "a"})
    assert len(load_preferences(path, keep_identical=True).pairs) == 1
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


ROWS = [{"prompt": "x", "chosen": "ä", "rejected": "b\u2028c"}, {"prompt": "y", "chosen": "c", "rejected": "d"}]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
CLEAN = b"\n".join(LINES) + b"\n"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", CLEAN),
        ("a.jsonl.gz", gzip.compress(CLEAN)),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("b14.jsonl", b"\xef\xbb\xbf" + LINES[0] + b"\r\n\r\n" + LINES[1]),
        ("gap.jsonl", b"\n\n" + LINES[0] + b"\n   \n" + LINES[1] + b"\n\n"),
    ],
)
def test_b14_one_content_in_every_dress(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert [record for _, record in read_records(path)] == ROWS


def test_b14_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES[0] + b"\r\n\r\n" + LINES[1])
    assert [where for where, _ in read_records(path)] == [f"{path}, line 1", f"{path}, line 3"]


@pytest.mark.parametrize(
    "content, message",
    [
        (LINES[0] + b'\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        (CLEAN.decode().encode("utf-16"), "line 1: not UTF-8"),
        (CLEAN + b'{"prompt": "x", "cho', "line 3: not valid JSON"),
        (CLEAN + b"[]\n", "line 3: expected a JSON object, found list"),
        (CLEAN + b"3\n", "line 3: expected a JSON object, found int"),
    ],
)
def test_b14_bad_bytes_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        list(read_records(path))


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[1, ", b"\xff", b"[1]"])
def test_a_json_file_is_a_list_of_objects(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        list(read_records(path))


def test_a_directory_is_read_file_by_file(write, tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write({"prompt": name, "chosen": "a", "rejected": "b"}, name=name)
    (tmp_path / "notes.txt").write_text("not data")
    assert [pair.prompt[0]["content"] for pair in load_preferences(str(tmp_path)).pairs] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.jsonl, \.jsonl\.gz or \.json file"):
        load_preferences(str(tmp_path / "empty"))


def test_a_name_that_is_neither_file_nor_data_set_is_said_so():
    with pytest.raises(ValueError, match="'nobody/nothing' is no local file"):
        load_preferences("nobody/nothing")


@pytest.fixture
def chat(build_byte_tokenizer):
    return ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")


def pair_of(chosen, rejected, prompt="pppp"):
    return PreferencePair([{"role": "user", "content": prompt}], chosen, rejected)


def test_b16_a_cut_answer_gets_no_stop_token_in_place_of_its_last(chat):
    """Within 40 tokens: 4 of the prompt and 36 of the answer."""
    text = "a" * 80
    beyond = encode_pair(pair_of(text, text[:60] + "b" * 20), chat, 40)
    assert beyond.chosen == beyond.rejected
    early = encode_pair(pair_of(text, "b" + text[1:]), chat, 40)
    last = encode_pair(pair_of(text, text[:35] + "b" + text[36:]), chat, 40)
    for pair in (early, last):
        assert len(pair.prompt + pair.chosen) == 40 == len(pair.prompt + pair.rejected)
        assert pair.ended == (False, False) and 2 not in pair.chosen + pair.rejected
    assert last.chosen[:-1] == last.rejected[:-1] and last.chosen[-1] != last.rejected[-1]


def test_the_prompt_is_cut_on_its_left_first_and_at_most_to_half(chat):
    prompt = "".join(map(chr, range(ord("A"), ord("A") + 30)))
    fits = encode_pair(pair_of("a" * 9, "b" * 5, prompt), chat, 40)
    assert chat.decode(fits.prompt) == prompt and fits.ended == (True, True)
    cut = encode_pair(pair_of("a" * 15, "b" * 5, prompt), chat, 40)
    assert chat.decode(cut.prompt) == prompt[-24:] and cut.ended == (True, True)
    long = encode_pair(pair_of("a" * 30, "b" * 5, prompt), chat, 40)
    assert chat.decode(long.prompt) == prompt[-20:] and chat.decode(long.chosen) == "a" * 20
    assert long.ended == (False, True)


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
