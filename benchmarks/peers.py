"""What the benchmarks beside another package share: sides that take turns, each in a process of its own.

A side is the benchmark's script again, in the peer's environment or in ours.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
Results = dict[str, list[dict[str, Any]]]  # of each side, one a turn
Measure = Callable[[dict[str, Any]], dict[str, Any]]  # a job to a result


def memory_mib(field: str = "VmHWM") -> int:
    """Peak resident memory of this process alone; `VmRSS` is what it holds now. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1024
    raise ValueError(f"/proc/self/status has no {field}; these benchmarks run on Linux.")


def give_back() -> None:
    """Return freed memory to the system, before the other side takes its turn."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Let the peak of memory start anew."""
    Path("/proc/self/clear_refs").write_text("5")


@functools.cache
def memory_of_imports() -> int:
    """What this process held when it first asked: in later repetitions it holds on to what it freed."""
    return memory_mib("VmRSS")


@contextlib.contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add wall time to an entry, and CPU time, which other jobs on the machine stretch less, to `NAME_cpu`."""
    begin = time.perf_counter(), time.process_time()
    yield
    for key, spent in ((name, time.perf_counter() - begin[0]), (f"{name}_cpu", time.process_time() - begin[1])):
        seconds[key] = seconds.get(key, 0.0) + spent


def timed(seconds: dict[str, float], name: str, owner: Any, attribute: str) -> None:
    """Time a function where a package calls it, from here on."""
    function = getattr(owner, attribute)
    function = getattr(function, "timed", function)  # of an earlier repetition

    def call(*args: Any, **options: Any) -> Any:
        with clock(seconds, name):
            return function(*args, **options)

    call.timed = function  # type: ignore[attr-defined]
    setattr(owner, attribute, call)


def serve(measure: Measure, job: str) -> None:
    """Be a side: measure once for each line of standard input, in a fresh folder; print the result as one line.

    The peak of memory starts anew each time.
    """
    for _ in sys.stdin:
        forget_peak()
        with tempfile.TemporaryDirectory() as output:
            result = measure(json.loads(job) | {"output": output})
        give_back()
        print("\nRESULT " + json.dumps(result), flush=True)


def alternate(
    script: str,
    sides: Mapping[str, tuple[str, dict[str, Any]]],
    repeats: int,
    threads: int,
    keep: Callable[[Results], None],
) -> Results:
    """Let each side measure so often, by turns; each is a process of its own, which serves.

    Args:
        sides: name of each side, with its Python and the job that it gets as `--side NAME JOB`.
        keep: called after every turn, so that a run that is stopped leaves what it has.
    """
    results: Results = {name: [] for name in sides}
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
        "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        errors = {name: stack.enter_context(tempfile.TemporaryFile("w+")) for name in sides}
        workers = {
            name: stack.enter_context(
                subprocess.Popen(
                    [python, script, "--side", name, json.dumps(job)], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors[name],
                )
            )
            for name, (python, job) in sides.items()
        }  # fmt: skip
        for turn in range(repeats):
            for name, worker in workers.items():
                results[name].append(_ask(name, worker, errors[name]))
                shown = {key: value for key, value in results[name][-1].items() if isinstance(value, int | float)}
                print(f"turn {turn + 1} of {repeats}, {name}: {json.dumps(shown)}", flush=True)
            keep(results)
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
    return results


def _ask(name: str, worker: Any, errors: Any) -> dict[str, Any]:
    worker.stdin.write("go\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    errors.seek(0)
    sys.exit(f"side {name} failed:\n{errors.read()[-4000:]}")


def parse(
    parser: argparse.ArgumentParser, output: str, peer: Measure, ours: Measure, peer_name: str
) -> argparse.Namespace | None:
    """Add the flags that all of these benchmarks have, and read them; None where this process was a side.

    Args:
        output: the JSON file. peer, ours: measure one side; peer_name: of the first.
    """
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model: checks the benchmark")
    parser.add_argument("--output", default=output)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        name, job = arguments.side
        serve(peer if name == peer_name else ours, job)
        return None
    if not arguments.peer_python or not arguments.dataset:
        parser.error("--peer_python and --dataset are needed")
    return arguments


def take_turns(
    script: str,
    sides: Mapping[str, tuple[str, dict[str, Any]]],
    arguments: argparse.Namespace,
    line_of: Callable[[Results], dict[str, Any]],
) -> dict[str, Any]:
    """Let the sides measure by turns, recording what there is after each; return the last line."""
    about = {"machine": machine(arguments.threads), "model": "tiny" if arguments.quick else MODEL}

    def line(results: Results) -> dict[str, Any]:
        return about | line_of(results)

    def keep(results: Results) -> None:
        record(arguments.output, line(results))

    return line(alternate(script, sides, arguments.repeats, arguments.threads, keep))


def median(results: list[dict[str, Any]], field: str) -> float:
    """Median of one figure over a side's repetitions."""
    return statistics.median(result[field] for result in results)


def ratio(peer: list[dict[str, Any]], ours: list[dict[str, Any]], field: str) -> float:
    """Median over turns of peer / ours: both of a turn ran one after the other, on a machine equally busy."""
    return round(statistics.median(a[field] / b[field] for a, b in zip(peer, ours, strict=True)), 2)


def met(target: float, *ratios: float) -> bool:
    """Whether a target is met by wall time and by CPU time both: on a busy machine either alone can be luck."""
    return min(ratios) >= target


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


def spent(seconds: dict[str, float], before: int, *packages: str) -> dict[str, Any]:
    """What every side says of its measurement: seconds by part, peak memory, also over `before`, and versions."""
    peak = memory_mib()
    return {
        "parts": {name: round(value, 2) for name, value in seconds.items()},
        "peak_mib": peak - before,
        "whole_mib": peak,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def model_for(quick: bool, folder: Path) -> str:
    """Directory of the model that both sides take: SmolLM2-135M, or a tiny one that checks the benchmark."""
    from segrew.embedded_model import resolve_model
    from segrew.tiny_model import make_tiny_model

    return str(make_tiny_model(folder / "model", steps=0)) if quick else resolve_model(MODEL)


def record(path: str, line: dict[str, Any]) -> None:
    """Write a line to a JSON file, in place of an earlier one of the same name and processor."""
    file = Path(path)
    lines = json.loads(file.read_text()) if file.exists() else []
    lines = [other for other in lines if _kind(other) != _kind(line)] + [line]
    file.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _kind(line: dict[str, Any]) -> tuple[str, str]:
    return line["name"], line["machine"]["processor"]
