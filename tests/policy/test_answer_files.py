"""Files have the very fields of the benchmarks' own (rows below are made up in their shape), and read back."""

import json
import os
from pathlib import Path

import pytest

from policy.answer_files import FORMATS, Author, Question, load_questions, question_of, read_replies
from segrew.records import read_records

ALPACA = {"dataset": "helpful_base", "instruction": "Name a bird.", "output": "A wren.", "generator": "gpt4"}
ARENA = {"uid": "0f3a", "category": "hard_prompt", "subcategory": "coding", "prompt": "Sort a list."}
ARENA_OLD = {"question_id": "9c21", "category": "v0.1", "cluster": "Sorting", "turns": [{"content": "Sort a list."}]}
BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Now shorter."]}

_STYLE = {
    "token_len": 7,
    "header_count": dict.fromkeys(["h1", "h2", "h3", "h4", "h5", "h6"], 0),
    "list_count": {"ordered": 0, "unordered": 0},
    "bold_count": {"**": 0, "__": 0},
}
_ASKED = {"role": "user", "content": "Sort a list."}
ARENA_ANSWER = {
    "uid": "0f3a",
    "ans_id": "x",
    "model": "m",
    "messages": [_ASKED, {"role": "assistant", "content": {"answer": "sorted(x)"}}],
    "tstamp": 1.5,
    "metadata": _STYLE,
}
ARENA_OLD_ANSWER = {
    "question_id": "9c21",
    "answer_id": "x",
    "model_id": "m",
    "choices": [{"index": 0, "turns": [{"content": "sorted(x)", "token_len": 7}]}],
    "tstamp": 1.5,
    "conv_metadata": _STYLE,
}
BENCH_ANSWER = {
    "question_id": 81,
    "answer_id": "x",
    "model_id": "m",
    "choices": [{"index": 0, "turns": ["A line of verse.", "A line."]}],
    "tstamp": 1.5,
}
CASES = {
    "alpaca_eval": ("alpaca_eval", ALPACA, ["A wren."], ALPACA),
    "arena_hard v2": ("arena_hard", ARENA, ["sorted(x)"], ARENA_ANSWER),
    "arena_hard v0.1": ("arena_hard", ARENA_OLD, ["sorted(x)"], ARENA_OLD_ANSWER),
    "mt_bench": ("mt_bench", BENCH, ["A line of verse.", "A line."], BENCH_ANSWER),
}
AUTHOR = Author("m", len)


def shape(value):
    """Field names and kinds of values, all the way down."""
    if isinstance(value, dict):
        return {name: shape(held) for name, held in value.items()}
    return [shape(held) for held in value] if isinstance(value, list) else type(value).__name__


def write(tmp_path, name, questions, answers) -> Path:
    return FORMATS[name].write(tmp_path, questions, answers, AUTHOR)


@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_fields_of_the_benchmarks_own(tmp_path, case):
    name, row, answers, expected = CASES[case]
    path = write(tmp_path, name, [question_of(row, "here", 1)], [answers])
    ((_, written),) = read_records(path)
    assert shape(written) == shape(expected)
    identity = {"uid", "question_id", "dataset", "instruction", "output", "choices", "messages"}
    unlike = {key for key in identity & set(expected) if written[key] != expected[key]}
    assert unlike <= {"choices"}  # token_len is that of another tokenizer


def test_alpaca_eval_is_a_json_list_and_its_dataset_is_optional(tmp_path):
    questions = [question_of({"instruction": "Go."}, "here", 1), question_of(ALPACA, "here", 2)]
    path = write(tmp_path, "alpaca_eval", questions, [["a"], ["b"]])
    first, second = json.loads(path.read_text())
    assert first == {"instruction": "Go.", "output": "a", "generator": "m"}
    assert (path.name, second["dataset"]) == ("model_outputs.json", "helpful_base")


def test_alpaca_eval_itself_reads_and_ranks_the_file(tmp_path, monkeypatch):
    """Its whole evaluation, but for the judge: here the longer answer wins."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    alpaca_eval = pytest.importorskip("alpaca_eval")

    class Longer(alpaca_eval.annotators.PairwiseAnnotator):
        def __init__(self, **_):
            self.is_reapply_parsing, self.input_keys = False, ["instruction"]

        def __call__(self, pairs, **_):
            rows = pairs.to_dict("records")
            return [row | {"preference": 1 + (len(row["output_2"]) > len(row["output_1"]))} for row in rows]

    rows = [ALPACA | {"instruction": f"Name {n} birds, please."} for n in range(9)]
    (tmp_path / "reference.json").write_text(json.dumps(rows))
    questions = [question_of(row, "here", n) for n, row in enumerate(rows)]
    path = write(tmp_path, "alpaca_eval", questions, [['No\n"bird" \u2028🐦' * (n < 3)] for n in range(9)])
    table, _ = alpaca_eval.evaluate(
        path, str(tmp_path / "reference.json"), Annotator=Longer, precomputed_leaderboard=None, output_path=None,
        fn_metric="get_winrate", sort_by="win_rate", is_return_instead_of_print=True,
    )  # fmt: skip
    assert table.loc["m", "win_rate"] == pytest.approx(100 * 3 / 9) and table.loc["m", "n_total"] == 9


def test_fastchat_itself_reads_the_file(tmp_path):
    common = pytest.importorskip("fastchat.llm_judge.common")
    (tmp_path / "question.jsonl").write_text(json.dumps(BENCH) + "\n")
    path = write(tmp_path, "mt_bench", load_questions(str(tmp_path / "question.jsonl")), [["A line.", "Line."]])
    questions = common.load_questions(str(tmp_path / "question.jsonl"), None, None)
    answers = common.load_model_answers(str(path.parent))
    common.check_data(questions, answers, {}, ["m"], {})
    assert common.get_model_list(path.parent) == ["m"]
    assert answers["m"][81]["choices"][0]["turns"] == ["A line.", "Line."]


def test_benchmarks_that_go_by_the_models_file_name_get_it(tmp_path):
    for case in ("arena_hard v2", "mt_bench"):
        name, row, answers, _ = CASES[case]
        path = write(tmp_path, name, [question_of(row, "here", 1)], [answers])
        assert path == tmp_path / "model_answer" / "m.jsonl"


def test_plain_rows_hold_a_turn_each_with_the_answers_before_it(tmp_path):
    path = write(tmp_path, "jsonl", [question_of(BENCH, "here", 1)], [["one", "two"]])
    first, second = (row for _, row in read_records(path))
    assert first == {"id": "81/1", "prompt": [{"role": "user", "content": "Write a line."}], "response": "one",
                     "model": "m"}  # fmt: skip
    assert [m["content"] for m in second["prompt"]] == ["Write a line.", "one", "Now shorter."]
    assert [m["role"] for m in second["prompt"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_reads_back(tmp_path, case):
    name, row, answers, _ = CASES[case]
    question = question_of(row, "here", 1)
    path = write(tmp_path, name, [question], [answers])
    replies = list(read_replies(str(path), {question.id: question}).values())
    assert [reply.text for reply in replies] == answers
    assert [reply.prompt for reply in replies] == [question.prompt(answers[:turn]) for turn in range(len(answers))]


def test_answers_to_the_same_words_meet_whatever_their_formats_and_however_often(tmp_path):
    questions = [Question("a", [_ASKED], row={"instruction": "Sort a list."}) for _ in range(2)]
    plain = read_replies(str(write(tmp_path, "jsonl", questions, [["1"], ["2"]])), {})
    alpaca = read_replies(str(write(tmp_path, "alpaca_eval", questions, [["x"], ["y"]])), {})
    assert [(plain[key].text, alpaca[key].text) for key in plain] == [("1", "x"), ("2", "y")]


def test_turns_meet_by_what_the_user_said(tmp_path):
    question = question_of(BENCH, "here", 1)
    one, other = ([["a", "b"]], [["c", "d"]])
    first = read_replies(str(write(tmp_path / "1", "mt_bench", [question], one)), {"81": question})
    second = read_replies(str(write(tmp_path / "2", "jsonl", [question], other)), {})
    assert [(first[key].text, second[key].text) for key in first] == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "x"}, "no 'prompt', 'messages', 'instruction' or 'turns'"),
        ({"turns": [{"text": "x"}]}, "'turns'"),
        ({"turns": ["x", 5]}, "holds no text"),
        ({"instruction": "  "}, "holds no text"),
        ({"prompt": 7}, "neither text nor a list"),
    ],
)
def test_a_row_with_nothing_to_answer_is_refused(row, message):
    with pytest.raises(ValueError, match="file, line 3.*" + message):
        question_of(row, "file, line 3", 3)


@pytest.mark.parametrize("name, row", [("alpaca_eval", ARENA), ("arena_hard", ALPACA), ("mt_bench", ARENA)])
def test_another_benchmarks_questions_are_refused(name, row):
    with pytest.raises(ValueError, match=f"file, line 1: --format {name} needs"):
        FORMATS[name].check([question_of(row, "file, line 1", 1)], name)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "x"}, "no answer found"),
        ({"prompt": "x", "response": None}, "no answer found"),
        ({"instruction": "x", "output": 3}, "no text"),
        (BENCH_ANSWER, "--questions"),
        (ARENA_ANSWER | {"messages": [_ASKED]}, "no text"),
        (BENCH_ANSWER | {"question_id": 5, "choices": []}, "holds no turns"),
    ],
)
def test_a_row_without_an_answer_is_refused_with_its_line(tmp_path, row, message):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"answers.jsonl, line 1: .*{message}"):
        read_replies(str(path), {"5": question_of(BENCH, "here", 1)})


def test_the_embedded_prompts_are_questions():
    questions = load_questions("everyday", "test")
    assert len(questions) == 120 and len({question.id for question in questions}) == 120


DATA = Path(os.environ.get("SEGREW_TEST_DATA", "/nowhere")) / "ppo"


@pytest.mark.skipif(not DATA.is_dir(), reason="SEGREW_TEST_DATA names no folder with the real files")
@pytest.mark.parametrize(
    "name, questions, answers, extra",
    [
        ("alpaca_eval", "alpaca_eval/gpt4_1106_preview/model_outputs.json.gz", "alpaca_eval/text_davinci_003/"
         "model_outputs.json.gz", set()),
        ("arena_hard", "arena_hard_v0.1/question.jsonl.gz", "arena_hard_v0.1/model_answer/gpt-4-0314.jsonl.gz",
         {"metadata"}),
        ("arena_hard", "arena_hard_v0.1/old_format/question.jsonl.gz",
         "arena_hard_v0.1/old_format/model_answer/gpt-4-0314.jsonl.gz", {"conv_metadata"}),
        ("mt_bench", "mt_bench/question.jsonl", "mt_bench/model_answer/gpt-4.jsonl.gz", set()),
    ],
)  # fmt: skip
def test_real_questions_and_answers_have_these_shapes(tmp_path, name, questions, answers, extra):
    asked = load_questions(str(DATA / questions))
    FORMATS[name].check(asked, name)
    path = write(tmp_path, name, asked, [["x"] * question.turns for question in asked])
    ours, theirs = ([row for _, row in read_records(file)] for file in (path, DATA / answers))
    assert set(ours[0]) - set(theirs[0]) == extra and set(theirs[0]) <= set(ours[0])
    known = {question.id: question for question in asked}
    if name == "mt_bench":  # the two files hold parts of the benchmark
        theirs_known = {str(row["question_id"]) for row in theirs}
        assert len(theirs_known & set(known)) > 50
        known |= {name: Question(name, [_ASKED], ["?"]) for name in theirs_known - set(known)}
    if "old_format" in answers:
        known |= {str(row["question_id"]): Question("", [_ASKED]) for row in theirs}
    assert len(read_replies(str(DATA / answers), known)) == len(theirs) * max(q.turns for q in asked)
