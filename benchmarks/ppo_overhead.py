"""What segmentation, normalization, spreading and macro advantages cost of a PPO step.

    python benchmarks/ppo_overhead.py            # SmolLM2-135M, 16 prompts, 48 tokens each, medians of 5 steps
    python benchmarks/ppo_overhead.py --quick    # a tiny model, seconds: checks the benchmark

Segments are what is rewarded and what acts. Timers stand around the functions of an ordinary run. Prints a table and
writes it to --output as JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peers import timed
from ppo_fixture import models, settings
from rich.console import Console
from rich.table import Table

import policy.ppo as ppo
from policy.ppo_run import open_run
from policy.roles import Roles
from reward_models import LocationNormalizer

TARGET = 0.02


def steps_of(count: int, quick: bool, prompts: int, tokens: int) -> list[dict[str, dict[str, float]]]:
    """Wall and CPU seconds of each part in each step; the first step, which warms up, is left out."""
    seconds: dict[str, float] = {}
    for owner, name in (
        (Roles, "reference_pass"),
        (ppo, "cut_units"),
        (LocationNormalizer, "normalize"),
        (ppo, "densify"),
        (ppo, "train_step"),
    ):
        timed(seconds, name, owner, name)
    found = []
    with models(quick) as (model, reward_model), tempfile.TemporaryDirectory() as folder:
        config = settings(
            model, reward_model, f"{folder}/run", rollout_batch_size=prompts, max_new_tokens=tokens, total_steps=count
        )
        run, _ = open_run(config)
        run.show = lambda text: None
        for step in range(1, count + 2):
            seconds.clear()
            ppo.train_step(run, step)
            found.append({"wall": parts_of(seconds), "cpu": parts_of(seconds, "_cpu")})
            print(f"step {step}: {found[-1]['wall']['the whole step']:.1f} s", flush=True)
    return found[1:]


def parts_of(seconds: dict[str, float], clock: str = "") -> dict[str, float]:
    parts = {
        "segmentation": seconds[f"cut_units{clock}"] - seconds[f"reference_pass{clock}"],
        "normalization": seconds[f"normalize{clock}"],
        "spreading, KL, macro advantages, whitening": seconds[f"densify{clock}"],
    }
    return parts | {"together": sum(parts.values()), "the whole step": seconds[f"train_step{clock}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="a tiny model; the target is for the full run")
    parser.add_argument("--output", default="benchmarks/ppo_overhead.json")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    found = steps_of(arguments.steps, arguments.quick, arguments.prompts, arguments.tokens)
    medians: dict[str, Any] = {
        clock: {part: statistics.median(step[clock][part] for step in found) for part in found[0][clock]}
        for clock in ("wall", "cpu")
    }
    share = {clock: medians[clock]["together"] / medians[clock]["the whole step"] for clock in medians}
    table = Table("", "wall ms", "CPU ms", "share of the CPU time", title="A PPO step, medians")
    for part, seconds in medians["cpu"].items():
        of_step = f"{seconds / medians['cpu']['the whole step']:.2%}"
        table.add_row(part, f"{1e3 * medians['wall'][part]:,.1f}", f"{1e3 * seconds:,.1f}", of_step)
    Console(width=110).print(table)
    record = {
        "prompts": arguments.prompts, "tokens": arguments.tokens, "steps": arguments.steps, "quick": arguments.quick,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "medians_s": medians, "share": share,
        "target": TARGET, "met": share["cpu"] <= TARGET, "seconds": time.perf_counter() - begin,
    }  # fmt: skip
    Path(arguments.output).write_text(json.dumps(record, indent=1) + "\n")
    verdict = "met" if record["met"] else "MISSED"
    print(f"{share['cpu']:.2%} of the CPU time, {share['wall']:.2%} of the wall time; target 2 %: {verdict}")


if __name__ == "__main__":
    main()
