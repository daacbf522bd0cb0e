"""The benchmark command: the documented files, and figures recomputed from scores row by row."""

import json

import pytest

from reward_models import SegmentRewardModel
from reward_models.rewardbench import BenchmarkConfig, run_benchmark
from segrew.cli import main
from segrew.metrics import wilson_interval
from segrew.run_directory import read_json, read_jsonl

SUBSETS = ["alpacaeval-easy", "math-prm", "hep-python", "refusals-offensive"]


@pytest.fixture(scope="module")
def rows(short_pairs):
    """Twelve pairs in RewardBench v1's format, one of them with equal answers."""
    rows = [
        {"id": i, "prompt": p.prompt[-1]["content"], "chosen": p.chosen, "rejected": p.rejected}
        | {"subset": SUBSETS[i % 4], "chosen_model": "a", "rejected_model": "b"}
        for i, p in enumerate(short_pairs)
    ]
    return [*rows[:-1], rows[-1] | {"rejected": rows[-1]["chosen"]}]


@pytest.fixture(scope="module")
def bench_file(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def result(tmp_path_factory, head_dir, bench_file):
    out = tmp_path_factory.mktemp("out") / "run"
    config = BenchmarkConfig(
        reward_model=str(head_dir), dataset_name=str(bench_file), output_dir=str(out), subset_label="rebuilt"
    )
    return run_benchmark(config), out


def test_results_have_the_documented_shape(result):
    record, out = result
    assert read_json(out / "results.json") == record
    assert {"benchmark", "subsets", "sections", "overall", "missing", "settings"} <= set(record)
    assert record["benchmark"] == "rewardbench" and set(record["subsets"]) == set(SUBSETS)
    assert all({"accuracy", "n", "ties", "ci95"} <= set(entry) for entry in record["subsets"].values())
    assert all({"accuracy", "n"} <= set(entry) for entry in record["sections"].values())
    settings = record["settings"]
    assert settings["subset_label"] == "rebuilt" and settings["rule"].startswith("entropy>")
    assert set(record["length_baseline"]["subsets"]) == set(SUBSETS)


def test_figures_are_those_of_scores_row_by_row(result, rows, head_dir):
    record, out = result
    model = SegmentRewardModel.from_pretrained(head_dir)
    stored = read_jsonl(out / "scores.jsonl")
    assert [row["id"] for row in stored] == [str(row["id"]) for row in rows]
    wins, longer, ties = ({name: 0 for name in SUBSETS} for _ in range(3))
    for row, kept in zip(rows, stored, strict=True):
        prompt = [{"role": "user", "content": row["prompt"]}]
        chosen, rejected = (r.score for r in model.score([prompt] * 2, [row["chosen"], row["rejected"]]))
        assert kept["score_chosen"] == pytest.approx(chosen, abs=1e-4)
        assert kept["score_rejected"] == pytest.approx(rejected, abs=1e-4)
        wins[row["subset"]] += chosen > rejected
        ties[row["subset"]] += row["chosen"] == row["rejected"]
        longer[row["subset"]] += len(row["chosen"]) > len(row["rejected"])
    for name, entry in record["subsets"].items():
        assert entry["accuracy"] == pytest.approx(wins[name] / 3) and entry["n"] == 3 and entry["ties"] == ties[name]
        assert entry["ci95"] == pytest.approx(wilson_interval(wins[name], 3))
        assert record["length_baseline"]["subsets"][name]["accuracy"] == pytest.approx(longer[name] / 3)


def test_pairs_without_subsets_have_one_accuracy(tmp_path, head_dir, pairs_file, capsys):
    argv = ["rewardbench", "--reward_model", str(head_dir), "--dataset_name", str(pairs_file)]
    assert main([*argv, "--output_dir", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "rows without a 'subset'" in error and "--benchmark pairs" in error and not (tmp_path / "a").exists()
    assert main([*argv, "--output_dir", str(tmp_path / "b"), "--benchmark", "pairs"]) == 0
    record = read_json(tmp_path / "b" / "results.json")
    scores = read_jsonl(tmp_path / "b" / "scores.jsonl")
    accuracy = sum(row["score_chosen"] > row["score_rejected"] for row in scores) / len(scores)
    assert record["overall"] == pytest.approx(accuracy) == record["subsets"]["all"]["accuracy"]
    assert record["subsets"]["all"]["n"] == 12 and record["missing"] == []


def test_the_first_rows_of_each_subset_are_enough_for_a_look(tmp_path, head_dir, bench_file):
    config = BenchmarkConfig(
        reward_model=str(head_dir), dataset_name=str(bench_file), output_dir=str(tmp_path / "a"), max_per_subset=2
    )
    assert [entry["n"] for entry in run_benchmark(config)["subsets"].values()] == [2, 2, 2, 2]


@pytest.mark.parametrize("rule", ["response", "token"])
def test_a_frozen_trunk_of_any_rule_can_be_benchmarked(tmp_path, train, pairs_file, rule):
    train(tmp_path / "rm", tune="head", rule=rule)
    config = BenchmarkConfig(
        reward_model=str(tmp_path / "rm"),
        dataset_name=str(pairs_file),
        output_dir=str(tmp_path / "a"),
        benchmark="pairs",
    )
    assert run_benchmark(config)["subsets"]["all"]["n"] == 12
