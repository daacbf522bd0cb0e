"""What run directories hold that a report can show; a damaged file costs its own place and a note, no more."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_models.normalizers import LocationNormalizer

KNOWN_FILES = (
    "run.json",
    "summary.json",
    "scores.jsonl",
    "normalizer.json",
    "metrics.jsonl",
    "results.json",
    "samples.jsonl",
    "evaluation.jsonl",
)


@dataclass
class RunFiles:
    """The contents of one directory, empty or None where a file is absent.

    Attributes:
        name: how the page calls it.
        answers: scored responses with segments. training, policy: metrics of `train-rm` and of PPO by step.
        samples: responses of the policy over training. evaluation: its scores on held-out prompts by step.
        notes: what could not be read, in words.
    """

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    normalizer: LocationNormalizer | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    policy: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_runs(run_dirs: Sequence[str | Path]) -> list[RunFiles]:
    """Read each directory and its sub-directories one level down, those without a known file left out.

    Raises:
        FileNotFoundError: a path that is no directory.
        ValueError: nothing to show anywhere.
    """
    runs = []
    for root in map(Path, run_dirs):
        if not root.is_dir():
            raise FileNotFoundError(f"--run_dirs {root}: no such directory; name a directory that a command wrote")
        for directory in [root, *sorted(path for path in root.iterdir() if path.is_dir())]:
            if any((directory / name).is_file() for name in KNOWN_FILES):
                name = root.resolve().name
                runs.append(_read(directory, name if directory == root else f"{name}/{directory.name}"))
    if not runs:
        where = ", ".join(map(str, run_dirs))
        raise ValueError(
            f"--run_dirs {where}: no file that a report can show (looked for {', '.join(KNOWN_FILES)}, there and one "
            "level down); name the --output_dir of a finished command"
        )
    return runs


def held_out_scores(run: RunFiles) -> list[tuple[float, float]]:
    """(step, mean score on held-out prompts), from evaluation.jsonl or else from the metrics."""
    rows = [(row.get("step"), row.get("score")) for row in run.evaluation]
    rows = rows or [(row.get("step"), row.get("eval/score")) for row in run.policy]
    return [(x, y) for step, score in rows if (x := finite(step)) is not None and (y := finite(score)) is not None]


def _read(directory: Path, name: str) -> RunFiles:
    run = RunFiles(name)
    run.run = _object(directory / "run.json", run)
    run.summary = _object(directory / "summary.json", run)
    run.results = _object(directory / "results.json", run)
    run.samples = _rows(directory / "samples.jsonl", run)
    run.evaluation = [row for row in _rows(directory / "evaluation.jsonl", run) if finite(row.get("score")) is not None]
    run.answers = [row for row in _rows(directory / "scores.jsonl", run) if "response" in row]
    for row in _rows(directory / "metrics.jsonl", run):
        from_policy = any(key.startswith(("reward/", "kl/", "policy/", "eval/")) for key in row)
        (run.policy if from_policy else run.training).append(row)
    run.normalizer = _guarded(directory / "normalizer.json", LocationNormalizer.load, run)
    return run


def _guarded(path: Path, read: Callable[[Path], Any], run: RunFiles) -> Any:
    if not path.is_file():
        return None
    try:
        return read(path)
    except (ValueError, OSError) as error:
        run.notes.append(f"{run.name}/{path.name} could not be read and is left out: {error}")
        return None


def _object(path: Path, run: RunFiles) -> dict[str, Any]:
    content = _guarded(path, lambda p: json.loads(p.read_text(encoding="utf-8-sig")), run)
    if content is not None and not isinstance(content, dict):
        run.notes.append(f"{run.name}/{path.name} is left out: it holds no JSON object")
    return content if isinstance(content, dict) else {}


def _rows(path: Path, run: RunFiles) -> list[dict[str, Any]]:
    """JSON lines, those that are no object counted and passed over (a running job's last line may be half written)."""
    text = _guarded(path, lambda p: p.read_text(encoding="utf-8-sig"), run) or ""
    rows, bad = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(number)
    if bad:
        lines = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        run.notes.append(f"{run.name}/{path.name}: {len(bad)} unreadable line(s) passed over ({lines})")
    return rows


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def finite_pair(value: Any) -> tuple[float | None, float | None]:
    """Both ends of an interval."""
    held = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    return finite(held[0]), finite(held[1])


def records(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; whatever else a file holds there is passed over."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """The object itself, or an empty one."""
    return value if isinstance(value, dict) else {}
