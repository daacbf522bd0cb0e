"""Whether all of segrew is right on a GPU, and how fast: one command for whoever has one, a few minutes long.

    python benchmarks/gpu_check.py                  # a CUDA device with 80 GB or more for the two whole steps
    python benchmarks/gpu_check.py --device cpu     # the same checks at small size, to check the checks

Every function in float32 beside float64 on the CPU, deterministic mode, hidden synchronisation, bandwidths beside that
of a copy, packed rows beside padded ones, bf16, compiling, one reward-model step and one PPO step of a random 1.1 B
Llama. Each check stands alone: one that fails is noted with its error. Exit status 1 if any does.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; deterministic mode needs it

import torch
import transformers
from gpu_outcome import outcome_of
from gpu_parity import parity_checks
from gpu_speed import SMALL, Scale, speed_checks
from rich.console import Console
from rich.table import Table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="Checks whose names hold one of these words.")
    parser.add_argument("--output", default="gpu_check.json", help="Where the results go.")
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; --device cpu checks the checks.")
    console, begin = Console(), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, at small size: checks the checks"
    console.print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}", highlight=False)
    results = {}
    with tempfile.TemporaryDirectory() as work:
        scale = Scale() if device.type == "cuda" else SMALL
        checks = parity_checks(device) | speed_checks(scale, device, Path(work))
        for label, check in checks.items():
            if options.only and not any(word in label for word in options.only):
                continue
            result = results[label] = outcome_of(check, device)
            mark = "[green]ok[/]" if result["ok"] else "[red]FAILS[/]"
            console.print(f"{mark:18} {label}", highlight=False)
    table = Table("check", "", "says", "s", box=None)
    for label, result in results.items():
        table.add_row(label, "ok" if result["ok"] else "FAILS", result["says"], f"{result['seconds']:.1f}")
    console.print(table, highlight=False, markup=False)
    failed = [label for label, result in results.items() if not result["ok"]]
    took = time.perf_counter() - begin
    console.print(f"{len(results) - len(failed)} of {len(results)} hold; {took:.0f} s", highlight=False)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    record = {"device": name, **versions, "seconds": took, "failed": failed, "checks": results}
    Path(options.output).write_text(json.dumps(record, indent=1))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
