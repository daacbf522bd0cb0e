"""Learning curves of PPO over arms and seeds: run one by one and kept, then intervals over seeds, tables, pictures.

An arm and a seed that is in the file is not run again, so an interrupted experiment goes on. Seeds are the outer loop:
wherever it is stopped, arms have equally many.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from policy.ppo import PPOConfig, train_policy
from segrew.metrics import bootstrap_interval
from segrew.run_directory import read_json, read_jsonl

Curve = dict[str, Any]
Settings = dict[str, Any]
Points = list[tuple[float, float]]  # of a line
BEST = 10  # the last steps, whose mean is an arm's final score
# Names in the record of a curve, and the metrics of a step that they stand for.
METRICS = {"scores": "reward/score", "kl": "kl/k1", "kl_answer": "kl/answer", "length": "response/length"}


def learn(settings: Settings, output: Path) -> Curve:
    """Train a policy; return its seconds, its metrics by step, and [step, mean] of each held-out evaluator."""
    begun, worked = time.perf_counter(), time.process_time()
    train_policy(PPOConfig(**settings, output_dir=str(output), overwrite_output_dir=True))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - worked
    rows = read_jsonl(output / "metrics.jsonl")
    curve: Curve = {"steps": len(rows), "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}
    curve |= {name: [round(row[metric], 5) for row in rows] for name, metric in METRICS.items()}
    if settings.get("eval_dataset"):
        held_out = read_jsonl(output / "evaluation.jsonl")
        judged = {
            name: [[e["step"], _mean(e["evaluators"][name])] for e in held_out] for name in held_out[0]["evaluators"]
        }
        curve["held_out"] = {"score": [[e["step"], _mean(e["scores"])] for e in held_out]} | judged
    return curve


def _mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 5)


def run_all(path: Path, arms: Iterable[str], seeds: int, run: Callable[[str, int], Curve]) -> Iterable[list[Curve]]:
    """Run every arm with every seed that is not in the file yet; yield all curves after each."""
    curves = read_jsonl(path) if path.exists() else []
    done = {(curve["arm"], curve["seed"]) for curve in curves}
    arms = list(arms)
    for seed in range(seeds):
        for arm in arms:
            if (arm, seed) not in done:
                curves.append({"arm": arm, "seed": seed} | run(arm, seed))
                with path.open("a") as file:
                    file.write(json.dumps(curves[-1]) + "\n")
                yield curves
    yield curves


def keep_reward_models(directory: Path, found: dict[str, dict[str, Any]]) -> None:
    """Write reward_models.json, unless the runs in results.jsonl have other reward models than these.

    Sampled pairs, and so the reward models, change with the rounding of a new version or machine.
    """
    path, seen = directory / "reward_models.json", ("accuracy", "n", "train_pairs")
    if path.exists() and (directory / "results.jsonl").exists():
        before, now = ({rule: [told[name] for name in seen] for rule, told in one.items()}
                       for one in (read_json(path), found))  # fmt: skip
        if before != now:
            raise SystemExit(
                f"the runs in {directory} have other reward models than those in --work now ({before}, here {now}): "
                "name the --work that holds theirs, or move results.jsonl and reward_models.json away to begin anew."
            )
    path.write_text(json.dumps(found, indent=1) + "\n")


def of_arm(curves: list[Curve], arm: str) -> list[Curve]:
    """The curves of one arm, by seed."""
    return sorted((curve for curve in curves if curve["arm"] == arm), key=lambda curve: curve["seed"])


def final(curve: Curve, key: str = "scores", last: int = BEST) -> float:
    """Mean over the last steps."""
    return statistics.fmean(curve[key][-last:])


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Running mean of the last `width` values."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def steps_to(curve: Curve, target: float) -> int | None:
    """First step whose running mean of five reaches the target."""
    return next((i + 1 for i, score in enumerate(smooth(curve["scores"])) if score >= target), None)


def pace(curve: Curve) -> float:
    """Seconds a step: of one core where they are known, which other jobs do not change, else of the clock."""
    return curve.get("cpu_seconds", curve["seconds"]) / curve["steps"]


def at(points: Sequence[Sequence[float]], x: float) -> float | None:
    """y where a curve of (x, y) first comes to x, by straight lines between its points; None if it never does."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return None


def by_kl(curve: Curve, evaluator: str) -> Points:
    """(KL an answer, mean held-out score); the KL over three steps: after step s it is that of step s + 1."""
    kl = curve["kl_answer"]
    return [(statistics.fmean(kl[max(0, step - 1) : step + 2]), score) for step, score in curve["held_out"][evaluator]]


def cell(values: Sequence[float], digits: int = 3) -> str:
    """Mean and its 95 % bootstrap interval over seeds."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, high = bootstrap_interval(values)
    return f"{statistics.fmean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def paired(curves: list[Curve], arm: str, other: str, value: Callable[[Curve], float | None]) -> list[float]:
    """value(arm) − value(other), seed by seed, of seeds that have both."""
    theirs = {curve["seed"]: value(curve) for curve in of_arm(curves, other)}
    pairs = [(value(curve), theirs.get(curve["seed"])) for curve in of_arm(curves, arm)]
    return [mine - yours for mine, yours in pairs if mine is not None and yours is not None]


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(entry) for entry in line) + " |" for line in lines)


def speed_table(curves: list[Curve], arms: Iterable[str], targets: Sequence[float]) -> str:
    """By arm: final score, steps to each target, seconds to the last one; where not all seeds arrive, how many do."""

    def arrival(found: list[Curve], target: float, step: Callable[[Curve], float], digits: int) -> str:
        reached = [(steps, curve) for curve in found if (steps := steps_to(curve, target)) is not None]
        if len(reached) < len(found):  # a mean over those that arrive would flatter the others
            return f"{len(reached)} of {len(found)} arrive"
        return cell([steps * step(curve) for steps, curve in reached], digits)

    rows = [
        (
            arm, len(found), cell([final(curve) for curve in found]),
            *(arrival(found, target, lambda curve: 1.0, 1) for target in targets),
            arrival(found, targets[-1], pace, 0), f"{statistics.median(map(pace, found)):.2f}",
        )
        for arm in arms
        if (found := of_arm(curves, arm))
    ]  # fmt: skip
    to = [f"steps to {target:.2f}" for target in targets]
    return markdown(("arm", "seeds", f"score, last {BEST} steps", *to, f"seconds to {targets[-1]:.2f}", "s/step"), rows)


def picture(
    path: Path, panels: dict[str, dict[str, list[Points]]], *, x: str, y: str, target: float | None = None
) -> None:
    """Draw panels of lines: for each name the curves of its seeds, as their mean with a 95 % band over seeds."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for name, seeds in lines.items():
            if not seeds:
                continue
            places = [point[0] for point in min(seeds, key=len)]
            columns = [[points[i][1] for points in seeds] for i in range(len(places))]
            (line,) = axis.plot(places, [statistics.fmean(column) for column in columns], label=name, linewidth=1.4)
            low, high = zip(*map(bootstrap_interval, columns), strict=True)
            axis.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        if target is not None:
            axis.axhline(target, color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x)
        if axis.lines:
            axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(y)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(
    path: Path, curves: list[Curve], arms: Iterable[str], scores: dict[str, Callable[[Curve], float | None]], *, y: str
) -> None:
    """Draw a point with its 95 % interval over seeds for each arm, and the seeds beside it; a panel for each score."""
    pyplot, arms = _pyplot(), [arm for arm in arms if of_arm(curves, arm)]
    figure, axes = pyplot.subplots(1, len(scores), figsize=(5.2 * len(scores), 0.36 * len(arms) + 1.2), sharey=True)
    for axis, (title, score) in zip(axes, scores.items(), strict=True):
        for place, arm in enumerate(arms):
            values = [value for curve in of_arm(curves, arm) if (value := score(curve)) is not None]
            if not values:
                continue
            low, high = bootstrap_interval(values)
            axis.plot([low, high], [place, place], color="C0", linewidth=2.2)
            axis.plot([statistics.fmean(values)], [place], "o", color="C0")
            axis.plot(values, [place + 0.22] * len(values), "|", color="grey", markersize=5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(y)
        axis.grid(axis="x", linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def by_step(curve: Curve, key: str = "scores") -> Points:
    """(step, running mean of five) of a metric."""
    return [(step, value) for step, value in enumerate(smooth(curve[key]), 1)]
