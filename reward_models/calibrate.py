"""Fit the location normalizer of a reward model on its own unit rewards (`segrew calibrate`)."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from reward_models.length_bias import describe_length_bias, length_bias
from reward_models.location_fit import Link, Regression
from reward_models.normalizer_parameters import Mode
from reward_models.normalizers import LocationBy, LocationNormalizer
from reward_models.pairs import segment_for, unit_rewards_of
from reward_models.segment_reward_model import NORMALIZER_FILE, SegmentRewardModel
from segrew.config import arg, parse
from segrew.preferences import EMBEDDED_PAIRS, load_preferences
from segrew.run_directory import write_json
from segrew.text_rules import warn_of_fallbacks

CALIBRATION_FILE = "calibration.json"
_LOCATION_LABELS = {"unit": "location p = unit / units", "token": "location p = share of tokens"}


@dataclass
class CalibrationConfig:
    """Which reward model, on which responses."""

    reward_model: str = arg("runs/reward_model", help="Reward-model directory; normalizer.json is written into it.")
    dataset_name: str = arg(EMBEDDED_PAIRS, help="Pairs whose answers, both sides, are scored: best the training set.")
    dataset_split: str = arg("train", help="Split of it.")
    max_pairs: int = arg(60_000, help="Use at most this many pairs, drawn with --seed.")
    per_device_eval_batch_size: int = arg(16, help="Responses scored at a time.")
    seed: int = arg(42, help="Of the draw.")
    normalizer: Mode = arg(
        "location",
        help="What normalizes rewards from now on: both lines, one mean and spread of all units (global), those of "
        "last units (last), or nothing. All are fitted, and `segrew ppo --normalizer` may choose another.",
    )
    regression: Regression = arg(
        "huber", help="huber: bins of equal weight, outliers bounded; weighted: least squares, weighted by their units."
    )
    link: Link = arg("linear", help="The spread as a line in ln p with a floor, or its logarithm, always positive.")
    location: LocationBy = arg("unit", help="p of a unit: its number over the number of units, or its share of tokens.")


def calibrate(config: CalibrationConfig, console: Console | None = None) -> LocationNormalizer:
    """Fit Mean(p) and Std(p) (2501.02790); write `normalizer.json`, `calibration.json` and a picture of the fit.

    Raises:
        ValueError: the reward model or the data cannot be used.
    """
    console, directory = console or Console(), Path(config.reward_model)
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    pairs = load_preferences(config.dataset_name, config.dataset_split).pairs
    if len(pairs) > config.max_pairs:
        pairs = random.Random(config.seed).sample(pairs, config.max_pairs)
    rows = config.per_device_eval_batch_size
    data = segment_for(reward_model, pairs, batch_size=rows, description="Cutting answers")
    warn_of_fallbacks([data.segmentation])
    unit_mask = data.segmentation.unit_mask
    rewards = unit_rewards_of(reward_model, data, batch_size=rows, description="Reading rewards")
    normalizer = LocationNormalizer(
        fingerprint=reward_model.fingerprint,
        rule=reward_model.segmentation.label,
        mode=config.normalizer,
        regression=config.regression,
        link=config.link,
        location_by=config.location,
    )
    normalizer.fit(rewards[unit_mask], normalizer.locations(data.segmentation)[unit_mask])
    length = length_bias(
        reward_model.aggregate(rewards, unit_mask).tolist(),
        data.conversations.lengths,
        [tuple(prompt) for prompt in data.conversations.prompts],
    )
    record = {
        "units": int(unit_mask.sum()),
        "responses": len(rewards),
        "length_bias": length,
        "settings": asdict(config),
    }
    normalizer.save(directory / NORMALIZER_FILE)
    write_json(directory / CALIBRATION_FILE, record)
    plot_fit(normalizer, directory / "normalizer.svg")
    _report(normalizer, record, console)
    console.print(f"Normalizer written to {directory / NORMALIZER_FILE}, picture to normalizer.svg")
    return normalizer


def _report(normalizer: LocationNormalizer, record: dict[str, Any], console: Console) -> None:
    low, high = normalizer.fitted_range or (0.0, 1.0)
    r2 = {key: "n/a" if value is None else f"{value:.3f}" for key, value in normalizer.r2.items()}
    console.print(
        f"{record['units']} unit rewards of {record['responses']} responses, locations {low:.4f} to {high:.2f}"
    )
    lines = normalizer.modes["location"]
    spread = f"{lines.w_sigma:+.4f} ln p {lines.b_sigma:+.4f}"
    spread = f"exp({spread})" if normalizer.link == "log" else f"{spread}, never below {lines.std_floor:.4f}"
    console.print(f"Mean(p) = {lines.w_mu:+.4f} ln p {lines.b_mu:+.4f}   R² {r2['mean']}")
    console.print(f"Std(p)  = {spread}   R² {r2['std']}   ({normalizer.regression} regression)")
    for name in ("global", "last"):
        if name in normalizer.modes:
            scalar = normalizer.with_mode(name)
            console.print(f"{name:6}  mean {scalar.mean(1.0):+.4f}, std {scalar.std(1.0):.4f}")
    console.print(f"In force: {normalizer.mode}")
    console.print(describe_length_bias(record["length_bias"]))
    table = Table("location", "units", "mean", "residual", "std", "residual", title="Fit by location")
    step = max(1, len(normalizer.bins) // 8)
    for point in normalizer.bins[::step]:
        table.add_row(
            f"{point.location:.3f}",
            str(point.count),
            f"{point.mean:+.3f}",
            f"{point.mean_residual:+.3f}",
            f"{point.std:.3f}",
            f"{point.std_residual:+.3f}",
        )
    console.print(table)


def plot_fit(normalizer: LocationNormalizer, path: Path) -> None:
    """Draw binned means and spreads against location with the fitted curves, and the residuals below them."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    lines = normalizer.with_mode("location")
    places = [point.location for point in lines.bins]
    curve = [p / 200 for p in range(max(1, int(200 * min(places))), 201)]
    for name, fitted, marker in (("mean", lines.mean, "o"), ("std", lines.std, "^")):
        (line,) = above.plot(curve, [float(fitted(p)) for p in curve], label=f"{name}(p), fitted")
        marks: dict[str, Any] = {"marker": marker, "ls": "", "color": line.get_color(), "ms": 3, "alpha": 0.6}
        above.plot(places, [getattr(point, name) for point in lines.bins], label=f"{name}, binned", **marks)
        below.plot(
            places, [getattr(point, f"{name}_residual") / lines.std(point.location) for point in lines.bins], **marks
        )
    above.set(ylabel="reward", title=f"Rewards by location, {normalizer.rule}")
    above.legend()
    below.axhline(0, color="grey", lw=0.8)
    below.set(xlabel=_LOCATION_LABELS[normalizer.location_by], ylabel="residual, in std(p)")
    figure.savefig(path)


def main(argv: list[str]) -> None:
    """Run `segrew calibrate`."""
    (config,) = parse("calibrate", (CalibrationConfig,), argv)
    calibrate(config)
