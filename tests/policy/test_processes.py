"""Two processes over gloo equal one in the stages that only read: calibration, scoring, benchmarks, answers."""

import json
import shutil
from pathlib import Path

import pytest

from segrew.cli import main
from segrew.run_directory import read_json, read_jsonl

ROOT = Path(__file__).parents[2]


def commands(path: Path, policy: Path, pairs: Path) -> list[list[str]]:
    """What is run in `path`, whose reward model is calibrated by it; answers are greedy."""
    flags = {
        "calibrate": {"dataset_name": pairs, "max_pairs": 7},
        "score": {"dataset_name": pairs, "max_rows": 3, "output_dir": path / "scores"},
        "rewardbench": {"benchmark": "pairs", "dataset_name": pairs, "output_dir": path / "bench"},
        "generate": {"model_name_or_path": policy, "dataset_name": pairs, "max_rows": 3, "temperature": 0}
        | {"max_new_tokens": 6, "best_of": 1, "model_id": "tiny", "output_dir": path / "answers"},
    }
    found = [[name, "--reward_model", str(path / "rm"), *words(own)] for name, own in flags.items()]
    # One row for two processes; and a benchmark that stopped after two of its rows.
    again = flags["rewardbench"] | {"max_per_subset": 1, "output_dir": path / "one_row"}
    return [*found, ["rewardbench", "--reward_model", str(path / "rm"), *words(again)], found[2]]


def words(flags: dict) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch, policy_dir, reward_dirs, pairs_file):
    path = tmp_path_factory.mktemp("stages")
    for name in ("one", "two"):
        shutil.copytree(reward_dirs["entropy"], path / name / "rm")
        (path / name / "rm" / "normalizer.json").unlink()
    for argv in commands(path / "one", policy_dir, pairs_file)[:-1]:
        assert main(argv) == 0
    written = commands(path / "two", policy_dir, pairs_file)
    (path / "commands.json").write_text(json.dumps(written[:-1]))
    done = launch(path, ROOT / "tests/policy/commands.py", path / "commands.json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return path, done


def near(value):
    """The same structure with its numbers to 1e-5."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.mark.slow
def test_calibration_merges_exactly(runs):
    path, _ = runs
    for name in ("normalizer.json", "calibration.json", "data.json"):
        one, two = (read_json(path / of / "rm" / name) for of in ("one", "two"))
        settings = one.get("settings", {}), two.get("settings", {})
        for each in settings:
            each.pop("reward_model", None)
        assert two == near(one)
    assert read_json(path / "two/rm/calibration.json")["responses"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("file", ["scores/scores.jsonl", "bench/scores.jsonl", "one_row/scores.jsonl"])
def test_each_row_is_scored_once_and_alike(runs, file):
    path, _ = runs
    one, two = (read_jsonl(path / of / file) for of in ("one", "two"))
    assert len(one) == {"scores": 3, "bench": 12, "one_row": 1}[file.split("/")[0]]
    assert two == near(one)


@pytest.mark.slow
def test_results_and_answers_are_alike_and_said_once(runs):
    path, done = runs
    one, two = (read_json(path / of / "bench/results.json") for of in ("one", "two"))
    for record in (one, two):
        record["settings"].pop("reward_model")
    assert two == near(one)
    texts = [[row["response"] for row in read_jsonl(path / of / "answers/scores.jsonl")] for of in ("one", "two")]
    assert len(texts[0]) == 3 and texts[0] == texts[1]
    assert done.stdout.count("Normalizer written") == done.stdout.count("3 answers scored") == 1
    assert done.stdout.count("Results written") == 2


@pytest.mark.slow
def test_a_stopped_benchmark_goes_on_with_two_processes(runs, launch, policy_dir, pairs_file):
    path, _ = runs
    scores = path / "two/bench/scores.jsonl"
    lines = scores.read_text().splitlines(keepends=True)
    scores.write_text("".join(lines[:5]))
    (path / "again.json").write_text(json.dumps(commands(path / "two", policy_dir, pairs_file)[-1:]))
    done = launch(path, ROOT / "tests/policy/commands.py", path / "again.json")
    assert "5 of 12 rows were scored before" in done.stdout, done.stderr[-4000:]
    assert read_jsonl(scores) == near([json.loads(line) for line in lines])
