"""`segrew score` and `segrew show`: answers in, segments with rewards out."""

import json
import re
import shutil

import pytest

from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.score import Answer, coloured, load_answers
from reward_models.scored_responses import ScoredResponse, Segment
from segrew.cli import main
from segrew.preferences import everyday_pairs
from segrew.run_directory import read_jsonl

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def load(tmp_path):
    def run(*rows):
        (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_answers(str(tmp_path / "answers.jsonl"), "train")[0]

    return run


def test_answers_are_rows_with_prompt_and_response_or_completion(load):
    found = load({"prompt": "hi", "response": "a", "id": "x"}, {"prompt": [USER], "completion": "b"})
    assert found == [Answer("x", [USER], "a"), Answer("2", [USER], "b")]


def test_pairs_give_both_sides_with_the_faults_of_the_rejected(load):
    marks = [{"start": 0, "end": 1, "kind": "rude"}]
    plain = load({"prompt": "hi", "chosen": "a", "rejected": "b", "faults": marks})
    turns = load({"chosen": [USER, {"role": "assistant", "content": "a"}],
                  "rejected": [USER, {"role": "assistant", "content": "b"}], "faults": marks})  # fmt: skip
    assert plain == turns
    assert [(a.response, a.side, len(a.faults)) for a in plain] == [("a", "chosen", 0), ("b", "rejected", 1)]
    assert len(load_answers("everyday", "test")[0]) == 240


@pytest.mark.parametrize("row", [{"prompt": "hi"}, {"response": "a"}, {"prompt": "hi", "response": None}])
def test_a_row_that_is_no_answer_names_its_line_and_what_is_null(load, row):
    found = ", ".join(name + " (null)" * (row[name] is None) for name in row)
    expected = rf"answers\.jsonl, line 2: needs 'prompt' and 'response' .* found {re.escape(found)}\."
    with pytest.raises(ValueError, match=expected):
        load({"prompt": "hi", "response": "a"}, row)


def test_scores_are_written_in_order_and_segments_rebuild_each_answer(tmp_path, head_dir, pairs_file, short_pairs):
    out = tmp_path / "scores"
    argv = ["--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--max_tokens_per_batch", "200"]
    assert main(["score", *argv, "--output_dir", str(out)]) == 0
    rows = read_jsonl(out / "scores.jsonl")
    answers = [
        (p.id, side, text) for p in short_pairs for side, text in (("chosen", p.chosen), ("rejected", p.rejected))
    ]
    assert [(row["id"], row["side"], row["response"]) for row in rows] == answers
    model = SegmentRewardModel.from_pretrained(head_dir)
    for row in rows:
        assert "".join(s["text"] for s in row["segments"]) == row["response"]
        assert all(row["response"][s["start"] : s["end"]] == s["text"] for s in row["segments"])
        assert row["score"] == pytest.approx(sum(s["reward"] for s in row["segments"]) / len(row["segments"]), abs=1e-5)
        assert row["score"] == pytest.approx(model.score([row["prompt"]], [row["response"]])[0].score, abs=1e-5)
        assert ("faults" in row) == (row["side"] == "rejected")


def test_the_first_rows_only(tmp_path, head_dir, pairs_file):
    argv = ["--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--max_rows", "3"]
    assert main(["score", *argv, "--output_dir", str(tmp_path / "a")]) == 0
    assert len(read_jsonl(tmp_path / "a" / "scores.jsonl")) == 3


def test_show_prints_each_answer_with_its_rewards(head_dir, pairs_file, short_pairs, capsys):
    argv = ["show", "--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--max_rows", "2"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert short_pairs[0].prompt[-1]["content"][:40] in printed and printed.count("  score ") == 2
    said = " ".join(printed.split())
    assert "its reward, as it was read" in said and "These are the first 2 answers of more; --max_rows" in said


def test_show_says_that_rewards_are_normalized_and_that_all_are_shown(head_dir, tmp_path, capsys):
    reward_dir = shutil.copytree(head_dir, tmp_path / "rm")
    model = SegmentRewardModel.from_pretrained(reward_dir)
    LocationNormalizer.from_parameters(0.0, 0.0, 5.0, 1.0, fingerprint=model.fingerprint).save(
        reward_dir / "normalizer.json"
    )
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "hi", "response": f"answer {i}"}) + "\n" for i in range(6)))
    assert main(["show", "--reward_model", str(reward_dir), "--dataset_name", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "its reward, normalized, while a score is made of rewards as read" in said
    assert said.count(" score ") == 6 + 1 and "of more" not in said  # the legend has the word, too


def test_show_takes_whole_texts_without_a_prompt(head_dir, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"chosen": "A good text.", "rejected": "A bad one."}))
    assert main(["show", "--reward_model", str(head_dir), "--dataset_name", str(path)]) == 0
    assert "> (whole texts, no prompt)" in capsys.readouterr().out


def test_colours_go_from_orange_to_blue_and_text_is_kept():
    segments = [Segment(t, i, i + 1, 1, r, None, 1.0) for i, (t, r) in enumerate([("a", -1.0), ("b", 1.0), ("c", 0.0)])]
    text = coloured(Answer("7", [USER], "abc"), ScoredResponse(0.0, segments))
    assert text.plain == "7   score +0.000\na-1.0b+1.0c+0.0"
    styles = [str(span.style) for span in text.spans if "#" in str(span.style)]
    assert styles == ["black on #ffa569", "black on #69b4ff", "black on #ffffff"]


def test_one_segment_or_equal_rewards_have_a_colour_too():
    segments = [Segment("a", 0, 1, 1, 2.0, None, 1.0)]
    assert "a+2.0" in coloured(Answer("", [USER], "a"), ScoredResponse(2.0, segments)).plain


def test_embedded_pairs_are_the_default(head_dir, capsys):
    assert main(["show", "--reward_model", str(head_dir), "--max_rows", "1"]) == 0
    assert everyday_pairs("test")[0].id in capsys.readouterr().out
