"""What the experiments' numbers rest on: resumption, intervals, interpolation at an equal KL, the planted rewards."""

import importlib
import json
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def module(monkeypatch):
    """Import a module of the experiments by its path below experiments/."""

    def load(name: str):
        for folder in (EXPERIMENTS, (EXPERIMENTS / name).parent):
            monkeypatch.syspath_prepend(folder)
        return importlib.import_module(Path(name).name)

    return load


def test_what_is_in_the_file_is_not_run_again_and_seeds_are_the_outer_loop(module, tmp_path):
    path, ran = tmp_path / "curves.jsonl", []
    path.write_text(json.dumps({"arm": "b", "seed": 0, "scores": [1.0]}) + "\n")

    def run(arm: str, seed: int) -> dict:
        ran.append((arm, seed))
        return {"scores": [0.0]}

    *_, curves = module("curves").run_all(path, ["a", "b"], 2, run)
    assert ran == [("a", 0), ("a", 1), ("b", 1)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == curves and len(curves) == 4


def test_a_score_is_read_where_its_curve_first_comes_to_a_kl(module):
    at = module("curves").at
    points = [(0.0, 0.5), (2.0, 0.7), (1.5, 0.9), (4.0, 0.1)]
    assert at(points, 0.0) == 0.5
    assert at(points, 1.5) == pytest.approx(0.65)
    assert at(points, 3.0) == pytest.approx(0.9 - 0.8 * 1.5 / 2.5)
    assert at(points, 4.1) is None


def test_steps_to_a_target_count_from_one_over_a_running_mean_of_five(module):
    steps_to = module("curves").steps_to
    assert steps_to({"scores": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]}, 0.6) == 8
    assert steps_to({"scores": [0, 1, 0, 1]}, 0.6) is None


def test_differences_are_taken_seed_by_seed(module):
    curves = [
        {"arm": arm, "seed": seed, "x": x}
        for arm, seed, x in (("a", 1, 5.0), ("a", 0, 3.0), ("b", 0, 1.0), ("b", 1, None), ("b", 2, 9.0))
    ]
    assert module("curves").paired(curves, "a", "b", lambda curve: curve["x"]) == [2.0]


@pytest.mark.parametrize("answer", ["", "a", "b" * 48, "a" * 48, "a" * 24 + "b" * 24, "cdaacccb" * 5])
def test_the_planted_task_pays_the_same_total_by_unit_or_at_the_end(module, answer):
    keys = module("planted/keys")
    units = [answer[i : i + keys.UNIT] for i in range(0, len(answer), keys.UNIT)] or [""]
    paid = keys.dense(["?"], [answer], [units])[0]
    assert len(paid) == len(units)
    assert sum(paid) == pytest.approx(keys.terminal(["?"], [answer])[0])


def test_the_optimum_of_the_planted_task_is_known(module):
    keys = module("planted/keys")
    assert keys.terminal(["?"], ["accc" * 6 + "cccb" * 6]) == pytest.approx([1.0])
    assert keys.terminal(["?"], ["a" * 48]) == pytest.approx([0.5])
    assert keys.terminal(["?"], ["b" * 24 + "a" * 24]) == [0.0]


def test_noise_is_the_same_for_the_same_answer_in_the_same_place(module):
    noisy, texts = module("macro_actions/rewards").noisy, ["a happy day", "a happy day", "a sad day"]
    pytest.importorskip("vaderSentiment")
    first = noisy(["?"] * 3, texts)
    assert first == noisy(["?"] * 3, texts)
    assert first[0] != first[1]
