"""The checks for a GPU run on a CPU at small size, each on its own, and see what is wrong."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_what_has_no_test_of_its_own_holds_at_small_size(tmp_path):
    """As its user runs it; values and the compiled graph have tests of their own."""
    words = ["mode", "synchronisation", "bandwidth", "padded", "bf16", "step", "chunks", "normalizer"]
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--device", "cpu", "--output", tmp_path / "out.json"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--only", *words], capture_output=True, text=True, env=environment, cwd=tmp_path)
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert done.returncode == 0 and all(one["ok"] for one in checks.values()), (done.stdout, done.stderr[-2000:])
    assert checks["PPO step"]["tokens_per_second"] > 0 and len(checks["reward-model step"]["losses"]) == 1
    assert checks["packed rows beside padded"]["states_gap"] < 1e-5
    assert 0 < checks["bf16 beside float32"]["nats"][0] < 0.05
    assert "PPO step" in done.stdout


def test_a_check_that_fails_is_noted_and_the_rest_go_on(load, tmp_path, monkeypatch):
    check, parity = load("gpu_check"), load("gpu_parity")

    def broken(x):
        raise RuntimeError("two\nlines")

    wrong = {"a": broken, "b": lambda x: [x.rewards + (x.rewards.dtype == torch.float32)], "c": lambda x: [x.values]}
    monkeypatch.setattr(parity, "CHECKS", wrong)
    monkeypatch.setattr(check, "speed_checks", lambda *_: {})
    status = check.main(["--device", "cpu", "--output", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert status == 1 and record["failed"] == ["a", "b", "deterministic mode"]
    assert record["checks"]["a"]["says"].startswith("lines (") and "test_gpu_check.py" in record["checks"]["a"]["says"]
    assert record["checks"]["c"]["ok"] and record["checks"]["b"]["difference"] == pytest.approx(1, rel=0.1)


def test_what_does_not_repeat_itself_is_named(load, monkeypatch):
    parity = load("gpu_parity")
    monkeypatch.setattr(parity, "CHECKS", {"steady": lambda x: [x.values], "loose": lambda x: [torch.rand(3)]})
    outcome = parity.repeats_itself(torch.device("cpu"))
    assert not outcome.ok and "loose" in outcome.says and "steady" not in outcome.says
    assert not torch.are_deterministic_algorithms_enabled()
