"""Reward models on rules that read text: trained, calibrated, scored and benchmarked by the commands as they are."""

import json

import pytest

from reward_models import SegmentRewardModel
from reward_models.benchmark_items import item_of_pair, score_items
from segrew.chat import ChatFormat
from segrew.cli import main
from segrew.language_models import load_tokenizer
from segrew.preferences import load_preferences
from segrew.run_directory import read_jsonl
from segrew.sentences import sentence_starts

CODE = {
    "prompt": "Add two numbers.",
    "chosen": "Here it is:\n\n```python\ndef add(first, second):\n    return first + second\n```\nIt returns the sum.",
    "rejected": "def add(first, second):\n    return first -",
}


@pytest.fixture(scope="module")
def code_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "pairs.jsonl"
    path.write_text(json.dumps(CODE) + "\n")
    return path


@pytest.mark.parametrize("rule", ["sentence", "python_ast", "constituency"])
def test_train_calibrate_score_and_benchmark(tmp_path, train, code_file, parser_dir, rule):
    flags = {"parser": parser_dir} if rule == "constituency" else {}
    path = tmp_path / "rm"
    train(path, rule=rule, tune="head", dataset_test_split="null", **flags)
    argv = ["--reward_model", str(path), "--dataset_name", str(code_file)]
    assert main(["calibrate", *argv]) == 0
    model = SegmentRewardModel.from_pretrained(path)
    assert json.loads((path / "normalizer.json").read_text())["fingerprint"] == model.fingerprint
    assert main(["score", *argv, "--output_dir", str(tmp_path / "scores")]) == 0
    assert main(["show", *argv]) == 0
    argv += ["--benchmark", "pairs", "--output_dir", str(tmp_path / "bench")]
    assert main(["rewardbench", *argv]) == 0

    pairs = load_preferences(str(code_file)).pairs
    (scored,) = score_items(model, [item_of_pair(pair) for pair in pairs])
    answers = dict(zip(("chosen", "rejected"), scored.answers, strict=True))
    for row, side in zip(read_jsonl(tmp_path / "scores" / "scores.jsonl"), ("chosen", "rejected"), strict=True):
        assert [s["text"] for s in row["segments"]] == [s.text for s in answers[side].segments]
        assert "".join(s["text"] for s in row["segments"]) == CODE[side]
        assert row["score"] == pytest.approx(answers[side].score, rel=0.01)  # bfloat16 where it is fast
    texts = [segment.text for segment in answers["chosen"].segments]
    if rule == "sentence":
        starts = sentence_starts(CODE["chosen"])
        assert len(texts) == len(starts) == 4
    if rule == "python_ast":
        assert texts[0] == "Here it is:\n\n" and texts[-1] == "It returns the sum." and len(texts) > 4
        assert [s.text for s in answers["rejected"].segments][-1].strip() == "return first -"


def test_truncated_answers_are_cut_by_the_text_that_is_left(tmp_path, train, pairs_file):
    model = train(tmp_path / "rm", rule="sentence", tune="head", max_length=64, dataset_test_split="null")
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(tmp_path / "rm")))
    for pair in load_preferences(str(pairs_file)).pairs[:3]:
        (record,) = model.score([pair.prompt], [pair.chosen * 3])
        kept = chat.decode(model.encode(pair.prompt, pair.chosen * 3).response)
        assert len(record.segments) == len(sentence_starts(kept))
