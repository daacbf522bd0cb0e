"""Data sets in columns of their own: each becomes the pair or prompt that its authors meant."""

import json
import os
from pathlib import Path

import pytest

from segrew.data_options import DataOptions
from segrew.dataset_formats import FORMATS, format_of, gives_pairs, hub_set, trl_type
from segrew.preferences import load_preferences
from segrew.prompts import load_prompts

DATA = Path(os.environ.get("SEGREW_TEST_DATA", "/nowhere"))  # public sets, raw and as converted by others
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="SEGREW_TEST_DATA names no directory")


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def load(tmp_path):
    def run(*rows, **options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_preferences(str(tmp_path / "rows.jsonl"), "train", DataOptions(**options))

    return run


START = "\n\nHuman: Hi.\n\nAssistant: Hello!\nWhat now?\n\nHuman: A joke: please.\n\nAssistant:"
TURNS = [user("Hi."), says("Hello!\nWhat now?"), user("A joke: please.")]
POST = {"id": "t3_1", "post": "I ate\n\nit.", "title": "Food", "subreddit": "AskReddit", "site": None, "article": None}
SUMMARIES = [{"text": " Ate it.", "policy": "sup2"}, {"text": " No.", "policy": "sup4"}]
QUESTION = {"dataset": "eli5", "id": "x", "full_text": "Why is it so?\n\nTell me."}
WEBGPT = {"question": QUESTION, "quotes_0": {}, "answer_0": "Bad [1].", "tokens_0": {}, "score_0": -0.5,
          "quotes_1": {}, "answer_1": "Good.", "tokens_1": {}, "score_1": 0.5}  # fmt: skip
BOTH = [user("Hi."), says("Hello!"), user("Bye.")]
ROWS = {
    "hh": ({"chosen": f"{START} Knock.", "rejected": f"{START} No."}, TURNS, "Knock.", "No."),
    "hh, prompt apart": ({"prompt": START, "response": " Knock.", "chosen": " Knock.", "rejected": " No."},
                         TURNS, "Knock.", "No."),
    "scored dialogues": ({"text": [f"{START} No.", f"{START} Knock."], "score": [-1.5, 2.0]}, TURNS, "Knock.", "No."),
    "scored dialogues, other marks": ({"text": ["## Human:\nx\n\n## Assistant:\ny", "## Human:\nx\n\n## Assistant:\nz"],
                                       "score": [1, 0]}, [user("x")], "y", "z"),
    "preference_700k": ({"chosen": [*BOTH, says("Bye!")], "rejected": [*BOTH, says("Stay.")], "chosen_score": 5.0,
                         "rejected_score": 3.0}, BOTH, "Bye!", "Stay."),
    "ultrafeedback": ({"prompt": "Bye.", "prompt_id": "ab", "chosen": [user("Bye."), says("Bye!")],
                       "rejected": [user("Bye."), says("Stay.")], "messages": [user("Bye."), says("Bye!")],
                       "score_chosen": 8.0, "score_rejected": 7.5}, [user("Bye.")], "Bye!", "Stay."),
    "tldr": ({"info": POST, "summaries": SUMMARIES, "choice": 1, "worker": "w", "batch": "b", "split": "train"},
             [user("POST\nSubreddit: r/AskReddit\nI ate\n\nit.\nTL;DR:")], " No.", " Ate it."),
    "webgpt": (WEBGPT, [user("Why is it so?\n\nTell me.")], "Good.", "Bad [1]."),
    "sharegpt": ({"conversations": [{"from": "human", "value": "x"}], "chosen": {"from": "gpt", "value": "y"},
                  "rejected": {"from": "gpt", "value": "z"}, "system": "S"},
                 [{"role": "system", "content": "S"}, user("x")], "y", "z"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_set_is_recognised_by_its_columns(load, name):
    row, prompt, chosen, rejected = ROWS[name]
    (pair,) = load(row).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, chosen, rejected)


@pytest.mark.parametrize("name", [name for name in ROWS if name in FORMATS])
def test_a_format_may_be_named(load, name):
    row, prompt, chosen, rejected = ROWS[name]
    (pair,) = load(row, dataset_format=name).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, chosen, rejected)


def test_ties_news_and_empty_sides_are_counted(load):
    tie = WEBGPT | {"score_0": 0.5}
    assert load(WEBGPT, tie).skipped == {"tie": 1}
    scored = ROWS["scored dialogues"][0]
    assert load(scored, scored | {"score": [1, 1]}).skipped == {"tie": 1}
    tldr = ROWS["tldr"][0]
    news = tldr | {"info": POST | {"post": None, "article": "News."}}
    undecided = tldr | {"choice": None}
    assert load(tldr, news, undecided).skipped == {"no Reddit post": 1, "no choice between two summaries": 1}
    hh = ROWS["hh"][0]
    assert load(hh, hh | {"chosen": START}, hh | {"chosen": f"{START} a\n\nHuman: b"}).skipped == {
        "empty answer": 1, "conversations part before the last message": 1,
    }  # fmt: skip


def test_answers_that_begin_like_a_speaker_are_no_dialogue(load):
    (pair,) = load({"prompt": "Write a scene.", "chosen": "Human: Hi.", "rejected": "Human: Go."}).pairs
    assert pair.prompt == [user("Write a scene.")] and pair.chosen == "Human: Hi."


def test_a_prompt_that_begins_like_a_speaker_is_a_dialogue_only_if_the_assistant_is_to_speak(load):
    (pair,) = load({"prompt": "Human: who are you?", "chosen": "An AI.", "rejected": "Nobody."}).pairs
    assert pair.prompt == [user("Human: who are you?")] and pair.chosen == "An AI."


def test_a_row_of_another_kind_than_named_says_so_with_its_line(load):
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, line 1: not a row of WebGPT comparisons \(KeyError: 'score_0'\)"
    ):
        load(ROWS["hh"][0], dataset_format="webgpt")
    with pytest.raises(ValueError, match="--dataset_format nothing: there is none of that name; choose one of hh, "):
        load(ROWS["hh"][0], dataset_format="nothing")


def test_well_known_sets_are_known_by_name():
    names = ["Anthropic/hh-rlhf", "hendrydong/preference_700K", "HuggingFaceH4/ultrafeedback_binarized",
             "openai/summarize_from_feedback", "openai/webgpt_comparisons", "codeparrot/apps"]  # fmt: skip
    assert [hub_set(name)[0] for name in names] == ["hh", "preference_700k", "ultrafeedback", "tldr", "webgpt", "apps"]
    assert hub_set("openai/summarize_from_feedback")[1].config == "comparisons"
    assert hub_set("HuggingFaceH4/ultrafeedback_binarized")[1].splits["train"] == "train_prefs"
    assert hub_set("nobody/nothing")[0] is None


ADD = {"problem_id": 7, "question": "Add two numbers.", "solutions": '["pass"]', "difficulty": "introductory",
       "url": "", "starter_code": ""}  # fmt: skip
STDIN = ADD | {"input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}'}
CALL = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
METHOD = ADD | {"starter_code": "class Solution:\n    def add(self, a, b):\n        ", "input_output": json.dumps(CALL)}


def test_problems_are_prompts_with_their_tests_in_columns(tmp_path):
    path = tmp_path / "apps.jsonl"
    rows = [STDIN, METHOD, ADD | {"input_output": "", "question": "No tests."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_prompts(str(path))
    texts = [prompt.messages[0]["content"] for prompt in loaded.prompts]
    assert texts[0] == "\nQUESTION:\nAdd two numbers.\n\nUse Standard Input format\n\nANSWER:\n"
    assert texts[1] == f"\nQUESTION:\nAdd two numbers.\n{METHOD['starter_code']}\n\nUse Call-Based format\n\nANSWER:\n"
    assert [prompt.columns["tests"] for prompt in loaded.prompts] == [
        {"inputs": ["1 2\n"], "outputs": ["3\n"]}, CALL,
    ]  # fmt: skip
    assert loaded.prompts[1].columns["starter_code"] == METHOD["starter_code"]
    assert loaded.sources[0].skipped == {"no tests": 1}
    with pytest.raises(ValueError, match=r"apps\.jsonl, line 1: no column 'chosen'"):
        load_preferences(str(path))


@pytest.mark.parametrize("row, kind", [
    ({"prompt": "x", "chosen": "a", "rejected": "b"}, "preference, explicit prompt, standard"),
    ({"chosen": "xa", "rejected": "xb"}, "preference, implicit prompt, standard"),
    ({"prompt": [], "chosen": [], "rejected": []}, "preference, explicit prompt, conversational"),
    ({"prompt": None, "chosen": [], "rejected": []}, "preference, implicit prompt, conversational"),
    ({"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": [2]}, "preference, token ids"),
    ({"prompt": "x"}, "prompt-only, standard"),
    ({"prompt": "x", "completion": "y"}, "prompt-completion, standard"),
    ({"prompt": "x", "completion": "y", "label": True}, "unpaired preference, standard"),
    ({"prompt": "x", "completions": ["y"], "labels": [True]}, "stepwise supervision, standard"),
    ({"messages": []}, "language modeling, conversational"),
    ({"a": 1, "b": 2}, "unknown, with columns a, b"),
])  # fmt: skip
def test_the_type_of_a_row_is_named_as_trl_names_it(row, kind):
    assert trl_type(row) == kind
    assert gives_pairs(format_of(row), row) == kind.startswith("preference")


@real_data
@pytest.mark.parametrize(
    "name", ["hh_harmless_base_test", "hh_helpful_test", "webgpt_test", "llamafactory_dpo_en_demo"]
)
def test_real_rows_give_what_another_converter_made_of_them(name):
    """The raw files hold the columns of their authors; the others were converted without this code."""
    ours = load_preferences(str(DATA / "raw" / f"{name}.jsonl.gz")).pairs
    theirs = load_preferences(str(DATA / "prefs" / f"{name}.jsonl.gz")).pairs
    assert [(p.prompt, p.chosen, p.rejected) for p in ours] == [(p.prompt, p.chosen, p.rejected) for p in theirs]


@real_data
def test_real_problems_are_the_same_from_directories_and_from_records():
    ours = load_prompts(str(DATA / "code" / "apps_dirs")).prompts
    records = load_prompts(str(DATA / "code" / "apps_format_from_apps.jsonl")).prompts
    key = {prompt.columns["problem_id"]: prompt for prompt in records}
    assert len(ours) == len(records) == 5
    for prompt in ours:
        other = key[prompt.columns["problem_id"]]
        assert prompt.messages == other.messages and prompt.columns["tests"] == other.columns["tests"]
    assert len(load_prompts(str(DATA / "code" / "apps_format_from_mbpp.jsonl.gz")).prompts) > 500
