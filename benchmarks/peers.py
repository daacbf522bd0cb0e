"""What the benchmarks beside another package share: sides that take turns, each in a process of its own.

A side is this script again, in the peer's environment or in ours. Each repetition is a fresh process, so that its
peak memory is its own and nothing is warm from the repetition before.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def memory_mib(field: str = "VmHWM") -> int:
    """Peak resident memory of this process alone; `VmRSS` is what it holds now. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1024
    raise ValueError(f"/proc/self/status has no {field}; these benchmarks run on Linux.")


@contextlib.contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add wall time to an entry, and CPU time, which other jobs on the machine stretch less, to `NAME_cpu`."""
    begin = time.perf_counter(), time.process_time()
    yield
    for key, spent in ((name, time.perf_counter() - begin[0]), (f"{name}_cpu", time.process_time() - begin[1])):
        seconds[key] = seconds.get(key, 0.0) + spent


def timed(seconds: dict[str, float], name: str, function: Any) -> Any:
    """The function, its calls timed: to stand in for it where a package calls it."""

    def call(*args: Any, **options: Any) -> Any:
        with clock(seconds, name):
            return function(*args, **options)

    return call


def finish(result: dict[str, Any]) -> None:
    """Hand a side's result to the process that asked for it."""
    print("\nRESULT " + json.dumps(result), flush=True)


def alternate(
    script: str, sides: Mapping[str, tuple[str, dict[str, Any]]], repeats: int, threads: int
) -> dict[str, list[dict[str, Any]]]:
    """Run each side so often, by turns.

    Args:
        sides: name of each side, with its Python and the job that it gets as `--side NAME JSON`.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
        "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    for turn in range(repeats):
        for name, (python, job) in sides.items():
            command = [python, script, "--side", name, json.dumps(job)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if done.returncode or not lines:
                sys.exit(f"side {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            results[name].append(json.loads(lines[-1].removeprefix("RESULT ")))
            shown = {key: value for key, value in results[name][-1].items() if isinstance(value, int | float)}
            print(f"turn {turn + 1} of {repeats}, {name}: {json.dumps(shown)}", flush=True)
    return results


def median(results: list[dict[str, Any]], field: str) -> float:
    """Median of one figure over a side's repetitions."""
    return statistics.median(result[field] for result in results)


def ratio(peer: list[dict[str, Any]], ours: list[dict[str, Any]], field: str) -> float:
    """Median over turns of peer / ours: both of a turn ran one after the other, on a machine equally busy."""
    return round(statistics.median(a[field] / b[field] for a, b in zip(peer, ours, strict=True)), 2)


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":")[1].strip() if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages, for a side's result."""
    return {name: importlib.metadata.version(name) for name in packages}


def record(path: str, line: dict[str, Any]) -> None:
    """Write a line to a JSON file, in place of an earlier one of the same name."""
    file = Path(path)
    lines = json.loads(file.read_text()) if file.exists() else []
    lines = [other for other in lines if other["name"] != line["name"]] + [line]
    file.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}")
