"""The demo at its tiny scale: every stage, every file, and the page at the end."""

import io
import json

import pytest
from rich.console import Console

from policy.demo import DemoConfig, run_demo
from segrew.cli import main


@pytest.mark.slow
def test_the_tiny_demo_runs_every_stage(tmp_path, capsys):
    output = tmp_path / "demo"
    printed = io.StringIO()
    report = run_demo(DemoConfig(scale="tiny", output_dir=str(output)), Console(file=printed, width=120))
    summary = json.loads((output / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == [
        "Model and data", "Segment reward model", "Location normalizer", "Benchmark", "Dense-reward PPO", "Report",
    ]  # fmt: skip
    accuracy, landed, gain = summary["headline"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"] and "the longer answer wins" in accuracy["note"]
    assert landed["low"] <= landed["value"] <= landed["high"] and "chance" in landed["note"]
    before, after = (float(word) for word in gain["note"].split(" before")[0].split() + gain["note"].split()[2:3])
    assert gain["value"] == pytest.approx(after - before, abs=2e-3)
    metrics = [json.loads(line) for line in (output / "policy" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["kl/k1"] == pytest.approx(0, abs=1e-6) and metrics[0]["policy/ratio_max"] >= 1
    page = report.read_text(encoding="utf-8")
    assert "Pair accuracy on held-out prompts" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert "What came of it" in printed.getvalue()
    before_bytes = (output / "summary.json").read_bytes()
    assert main(["demo", "--scale", "tiny", "--output_dir", str(output)]) == 2  # holds a run already
    assert "already holds a run" in capsys.readouterr().err
    assert (output / "summary.json").read_bytes() == before_bytes
