"""`segrew rewardbench` on a tiny reward model: files, table, quick look, both benchmarks."""

import json

import pytest

from reward_models.rewardbench import BenchmarkConfig, run_benchmark
from segrew.cli import main
from segrew.run_directory import read_jsonl

ROWS = [
    {"id": 1, "subset": "alpacaeval-easy", "prompt": "Name a river.", "chosen": "The Loire.", "rejected": "No."},
    {
        "id": 2,
        "subset": "alpacaeval-easy",
        "prompt": "Name a lake.",
        "chosen": "Como.",
        "rejected": "Lake Como, Italy.",
    },
    {"id": 3, "subset": "hep-python", "prompt": "Add 1.", "chosen": "x + 1", "rejected": "x - 1"},
    {"id": 4, "subset": "hep-python", "prompt": "Add 2.", "chosen": "x + 2", "rejected": "x + 2"},
]


@pytest.fixture()
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def run(head_dir, rows_file, tmp_path, **settings):
    output = str(tmp_path / "bench")
    return run_benchmark(
        BenchmarkConfig(reward_model=str(head_dir), dataset_name=rows_file, output_dir=output, **settings)
    )


def test_results_follow_from_the_scores_it_wrote(head_dir, rows_file, tmp_path, capsys):
    record = run(head_dir, rows_file, tmp_path, subset_label="rebuilt")
    scores = read_jsonl(tmp_path / "bench" / "scores.jsonl")
    assert [row["id"] for row in scores] == ["1", "2", "3", "4"]
    wins = [row["score_chosen"] > row["score_rejected"] for row in scores]
    assert record["subsets"]["alpacaeval-easy"]["accuracy"] == sum(wins[:2]) / 2
    assert record["subsets"]["hep-python"]["accuracy"] == sum(wins[2:]) / 2
    assert record["subsets"]["hep-python"]["ties"] == 1  # identical answers are a tie, kept and counted
    assert record["overall"] == pytest.approx((sum(wins[:2]) / 2 + sum(wins[2:]) / 2) / 2)
    assert record["missing"] == ["Chat Hard", "Safety"]
    assert record["length_baseline"]["subsets"]["alpacaeval-easy"]["accuracy"] == 0.5
    assert json.loads((tmp_path / "bench" / "results.json").read_text()) == json.loads(json.dumps(record))
    printed = capsys.readouterr().out
    assert "(rebuilt)" in printed and "longer wins" in printed and "Missing: Chat Hard, Safety" in printed


def test_scores_do_not_depend_on_the_batch(head_dir, rows_file, tmp_path):
    run(head_dir, rows_file, tmp_path, per_device_eval_batch_size=1)
    one = read_jsonl(tmp_path / "bench" / "scores.jsonl")
    run(head_dir, rows_file, tmp_path, per_device_eval_batch_size=8, overwrite_output_dir=True)
    many = read_jsonl(tmp_path / "bench" / "scores.jsonl")
    for a, b in zip(one, many, strict=True):
        assert a["score_chosen"] == pytest.approx(b["score_chosen"], abs=1e-5)
        assert a["score_rejected"] == pytest.approx(b["score_rejected"], abs=1e-5)


def test_a_quick_look_takes_the_first_rows_of_each_subset(head_dir, rows_file, tmp_path):
    run(head_dir, rows_file, tmp_path, max_per_subset=1)
    assert [row["id"] for row in read_jsonl(tmp_path / "bench" / "scores.jsonl")] == ["1", "3"]


def test_pairs_pool_all_rows(head_dir, rows_file, tmp_path):
    record = run(head_dir, rows_file, tmp_path, benchmark="pairs")
    assert record["subsets"]["all"]["n"] == 4 and record["overall"] == record["subsets"]["all"]["accuracy"]
    assert record["missing"] == [] and record["sections"] == {}


def test_rows_without_subset_are_refused_and_nothing_is_written(head_dir, pairs_file, tmp_path, capsys):
    flags = ["--reward_model", str(head_dir), "--dataset_name", str(pairs_file), "--output_dir", str(tmp_path / "b")]
    assert main(["rewardbench", *flags]) == 2
    assert "use --benchmark pairs" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
