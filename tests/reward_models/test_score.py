"""`segrew score` and `segrew show`."""

import json

import pytest

from reward_models.score import Answer, coloured, load_answers, main, show
from reward_models.segment_reward_model import ScoredResponse, Segment
from segrew.run_directory import read_jsonl


def test_scores_jsonl_holds_each_answer_with_segments_that_rebuild_it(head_dir, pairs_file, tmp_path):
    output = tmp_path / "scores"
    main(["--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--output_dir", str(output)])
    rows = read_jsonl(output / "scores.jsonl")
    given = [json.loads(line) for line in pairs_file.read_text(encoding="utf-8").splitlines()]
    assert [row["response"] for row in rows] == [row[side] for row in given for side in ("chosen", "rejected")]
    for row in rows:
        assert "".join(segment["text"] for segment in row["segments"]) == row["response"]
        rewards = [segment["reward"] for segment in row["segments"]]
        assert row["score"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    assert "faults" not in rows[0] and rows[1]["faults"] == given[0]["faults"]


def test_rows_with_prompt_and_response(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "Hi", "response": "Hello"}\n{"prompt": "Hi"}\n')
    with pytest.raises(ValueError, match=r"answers.jsonl, line 2: needs 'prompt' and 'response'"):
        load_answers(str(path), "train")
    path.write_text('{"prompt": "Hi", "response": "Hello", "id": "a"}\n')
    assert load_answers(str(path), "train") == [Answer("a", [{"role": "user", "content": "Hi"}], "Hello")]


def test_low_segments_are_orange_and_high_ones_blue():
    segments = [Segment("low ", 0, 4, 1, 0.0, -2.0, 0.5), Segment("high", 4, 8, 1, 0.0, 2.0, 1.0)]
    text = coloured(Answer("a", [], "low high"), ScoredResponse(0.0, segments))
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    low, high = (styles[key].removeprefix("black on #") for key in ("low ", "high"))
    assert int(low[:2], 16) > int(low[4:], 16)  # more red than blue
    assert int(high[:2], 16) < int(high[4:], 16)


def test_show_prints_every_character_of_the_answer(head_dir, pairs_file, capsys):
    show(["--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--max_rows", "1"])
    assert "score" in capsys.readouterr().out
