"""The `rewardbench` program itself, on the same model and rows: it pins its own transformers, so it runs by itself.

Name the Python of an environment that has it in $REWARDBENCH_PYTHON; without one this is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward_models.rewardbench_sections import EXAMPLE_COUNTS
from segrew.preferences import everyday_pairs
from segrew.run_directory import read_json

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rewardbench_vs_package.py"
PEER = os.environ.get("REWARDBENCH_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="$REWARDBENCH_PYTHON names no environment with rewardbench")
def test_scores_accuracies_and_sections_are_those_of_the_rewardbench_program(tmp_path):
    """A tiny bandit model, two rows of each of the 23 subsets."""
    rows = [
        {"id": i, "subset": list(EXAMPLE_COUNTS)[i % 23], "chosen": pair.chosen, "rejected": pair.rejected}
        | {"prompt": pair.prompt[-1]["content"], "chosen_model": "a", "rejected_model": "b"}
        for i, pair in enumerate(everyday_pairs("test")[:46])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, SCRIPT, "--peer_python", PEER, "--dataset", tmp_path / "rows.jsonl", "--quick"]
    command += ["--rows", "46", "--repeats", "1", "--output", tmp_path / "found.json"]
    subprocess.run([str(part) for part in command], check=True, cwd=SCRIPT.parents[1])
    (found,) = read_json(tmp_path / "found.json")
    count = found["settings"]["rows"]
    assert count == found["rows_of_equal_tokens"] == found["rows_judged_alike"] == 46
    assert found["largest_difference_of_their_scores"] < 1e-4
    theirs, ours = found["sections"]
    assert len(theirs) == 4 and ours == pytest.approx(theirs)
    theirs, ours = found["accuracies"]
    assert 0 < theirs < 1 and ours == pytest.approx(theirs)
