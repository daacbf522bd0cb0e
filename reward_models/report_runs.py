"""What run directories hold that a report can show; a damaged file costs its own place and a note, no more."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_models.normalizers import LocationNormalizer

SCORED_PAIRS = "scored_pairs"
SHOWN = (
    "summary.json",
    "scores.jsonl",
    "segments.jsonl",
    SCORED_PAIRS,
    "normalizer.json",
    "calibration.json",
    "metrics.jsonl",
    "results.json",
    "judge.json",
    "samples.jsonl",
    "evaluation.jsonl",
)
_NOT_SHOWN = {"probe": "probe.json", "generate": "metadata.json"}  # command -> what it writes at its end


@dataclass
class RunFiles:
    """The contents of one directory, empty or None where a file is absent.

    Attributes:
        name: how the page calls it.
        answers: responses with their score, segments, or both; of a reward model the pairs it was last evaluated on.
        training, policy: metrics of `train-rm` and of PPO by step.
        samples: responses of the policy over training. evaluation: its scores on held-out prompts by step.
        notes: what could not be read, in words.
    """

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    judge: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    normalizer: LocationNormalizer | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    policy: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_runs(run_dirs: Sequence[str | Path]) -> list[RunFiles]:
    """Read each directory and its sub-directories one level down, or a file of scored answers.

    A directory that holds nothing a report can show gets a note; one level down it is passed over.

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: nothing to show anywhere.
    """
    places: dict[Path, str] = {}
    notes = []
    for root in map(Path, run_dirs):
        if not root.exists():
            raise FileNotFoundError(f"--run_dirs {root}: no such directory; name a directory that a command wrote")
        name = root.resolve().name
        inside = [] if root.is_file() else sorted(path for path in root.iterdir() if path.is_dir())
        found = {root: name, **{path: f"{name}/{path.name}" for path in inside}}
        found = {path: name for path, name in found.items() if path.is_file() or _holds(path, "run.json", *SHOWN)}
        places |= {path: name for path, name in found.items() if path not in places}
        if not found:
            notes.append(
                f"{root}: no file that a report can show (looked for {', '.join(SHOWN)}, there and one level down)"
            )
    if not places:
        raise ValueError(f"--run_dirs {'; '.join(notes)}; name the --output_dir of a finished command")
    times = Counter(places.values())
    runs = [_read(path, name if times[name] == 1 else str(path)) for path, name in places.items()]
    runs[0].notes = notes + runs[0].notes
    return runs


def _holds(directory: Path, *names: str) -> bool:
    return any((directory / name).exists() for name in names)


def held_out_scores(run: RunFiles) -> list[tuple[float, float]]:
    """(step, mean score on held-out prompts), from evaluation.jsonl or else from the metrics."""
    rows = [(row.get("step"), row.get("score")) for row in run.evaluation]
    rows = rows or [(row.get("step"), row.get("eval/score")) for row in run.policy]
    return [(x, y) for step, score in rows if (x := finite(step)) is not None and (y := finite(score)) is not None]


def _read(place: Path, name: str) -> RunFiles:
    run = RunFiles(name)
    if place.is_file():
        run.answers = [row for row in _rows(place, run) if "response" in row]
        if not run.answers:
            run.notes.append(f"{name} is left out: no line of it has a response, as those of scores.jsonl have")
        return run
    run.run = _object(place / "run.json", run)
    if not _holds(place, *SHOWN):
        command = run.run.get("command")
        result = _NOT_SHOWN.get(str(command))
        finished = result is not None and _holds(place, result)
        done = f"it has finished, but what it wrote, {result} and beside it, is not part of a report"
        why = done if finished else "it has written no result yet"
        run.notes.append(f"{name}: only the settings of `segrew {command}` are shown; {why}")
    for kind in ("summary", "results", "judge", "calibration"):
        setattr(run, kind, _object(place / f"{kind}.json", run))
    run.samples = _rows(place / "samples.jsonl", run)
    run.evaluation = [row for row in _rows(place / "evaluation.jsonl", run) if finite(row.get("score")) is not None]
    run.answers = [row for row in _rows(place / "scores.jsonl", run) if "response" in row]
    run.answers = run.answers or [_as_answer(row) for row in _rows(place / "segments.jsonl", run)]
    evaluations = sorted((place / SCORED_PAIRS).glob("step-*.jsonl"))
    if not run.answers and evaluations:
        run.answers = [answer for row in _rows(evaluations[-1], run) for answer in _sides(row)]
    for row in _rows(place / "metrics.jsonl", run):
        from_policy = any(key.startswith(("reward/", "kl/", "policy/", "eval/")) for key in row)
        (run.policy if from_policy else run.training).append(row)
    run.normalizer = _guarded(place / "normalizer.json", LocationNormalizer.load, run)
    return run


def _as_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A line of `segrew segment`: units without rewards, whose texts rebuild the response."""
    units = records(row.get("units"))
    return {**row, "response": "".join(str(unit.get("text") or "") for unit in units), "segments": units}


def _sides(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Both answers of a pair that training scored as a whole."""
    return [
        {"id": row.get("id"), "prompt": row.get("prompt"), "side": side, "response": row.get(side)}
        | {"score": row.get(f"score_{side}")}
        for side in ("chosen", "rejected")
    ]


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
