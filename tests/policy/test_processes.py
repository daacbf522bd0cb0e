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
        "score": {"dataset_name": pairs, "max_rows": 3, "output_dir": path / "scores"},
        "calibrate": {"dataset_name": pairs, "max_pairs": 7},
        "rewardbench": {"benchmark": "pairs", "dataset_name": pairs, "output_dir": path / "bench"},
        "generate": {"model_name_or_path": policy, "dataset_name": pairs, "max_rows": 3, "temperature": 0}
        | {"max_new_tokens": 6, "best_of": 1, "model_id": "tiny", "output_dir": path / "answers"},
    }
    found = [[name, "--reward_model", str(path / "rm"), *words(own)] for name, own in flags.items()]
    # One row for two processes; and a run that has stopped after five rows.
    for name, limit in (("one_row", 1), ("stopped", None)):
        own = flags["rewardbench"] | {"output_dir": path / name} | ({"max_per_subset": limit} if limit else {})
        found.append(["rewardbench", "--reward_model", str(path / "rm"), *words(own)])
    return found


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
    stopped = shutil.copytree(path / "one" / "bench", path / "two" / "stopped") / "scores.jsonl"
    stopped.write_text("".join(stopped.read_text().splitlines(keepends=True)[:5]))
    (path / "commands.json").write_text(json.dumps(commands(path / "two", policy_dir, pairs_file)))
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
    assert done.stdout.count("Results written") == 3


@pytest.mark.slow
def test_a_stopped_benchmark_goes_on_with_two_processes(runs):
    path, done = runs
    assert done.stdout.count("5 of 12 rows were scored before") == 1
    assert read_jsonl(path / "two/stopped/scores.jsonl") == near(read_jsonl(path / "one/bench/scores.jsonl"))
