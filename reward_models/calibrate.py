"""Fit the location normalizer of a reward model on its own unit rewards (`segrew calibrate`)."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from reward_models.card import RewardModelCard
from reward_models.checkpoints import find_checkpoint
from reward_models.model_card import model_card_kept_up
from reward_models.normalizers import LocationNormalizer
from reward_models.pairs import readings_of, segment_for
from reward_models.segment_reward_model import NORMALIZER_FILE, SegmentRewardModel
from segrew.config import arg, parse
from segrew.data_options import DataOptions
from segrew.language_models import TOKENS_PER_BATCH
from segrew.preferences import EMBEDDED_PAIRS, load_preferences
from segrew.sources import DataRecord, write_records
from segrew.text_rules import warn_of_fallbacks


@dataclass
class CalibrationConfig:
    """Which reward model, on which responses."""

    reward_model: str = arg("runs/reward_model", help="Reward-model directory; normalizer.json is written into it.")
    dataset_name: list[str] | str = arg(
        [EMBEDDED_PAIRS], help="Pairs whose answers, both sides, are scored: best the training set."
    )
    dataset_split: str = arg("train", help="Split of it.")
    max_pairs: int = arg(60_000, help="Use at most this many pairs, drawn with --seed.")
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")
    seed: int = arg(42, help="Of the draw.")
    preset: str | None = arg(None, help="Take a normalizer released with 2501.02790 instead, such as phi3-mini-1.75.")


def calibrate(
    config: CalibrationConfig, console: Console | None = None, options: DataOptions | None = None
) -> LocationNormalizer:
    """Fit Mean(p) and Std(p), write `normalizer.json` and a picture of the fit beside it (2501.02790).

    Raises:
        ValueError: the reward model or the data cannot be used.
    """
    console, directory = console or Console(), Path(config.reward_model)
    if config.preset is not None:
        return _from_preset(config.preset, directory, console)
    if directory != find_checkpoint(directory):
        raise ValueError(
            f"{directory} is on the hub; download it, for {NORMALIZER_FILE} is written into its directory."
        )
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    options = (options or DataOptions()).for_stage("reward")
    limits: dict[str, Any] = {"limit": config.max_pairs if options.streaming else None, "seed": config.seed}
    loaded = load_preferences(config.dataset_name, config.dataset_split, options, **limits)
    pairs = loaded.pairs
    if len(pairs) > config.max_pairs:
        pairs = random.Random(config.seed).sample(pairs, config.max_pairs)
    tokens = config.max_tokens_per_batch
    data = segment_for(reward_model, pairs, max_tokens=tokens, description="Cutting answers")
    warn_of_fallbacks([data.segmentation])
    unit_mask = data.segmentation.unit_mask
    rewards = readings_of(reward_model, data, max_tokens=tokens, description="Reading rewards").rewards[unit_mask]
    locations = data.segmentation.locations[unit_mask]
    normalizer = LocationNormalizer(fingerprint=reward_model.fingerprint, rule=reward_model.segmentation.label)
    normalizer.fit(rewards, locations, compat=reward_model.segmentation.compat)
    _save(normalizer, directory)
    plot_fit(normalizer, directory / "normalizer.svg")
    record = DataRecord("calibration", "pairs", len(data), loaded.sources, data.fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(directory, [record])
    _report(normalizer, len(rewards), len(data), console)
    console.print(f"Normalizer written to {directory / NORMALIZER_FILE}, picture to normalizer.svg")
    return normalizer


def _save(normalizer: LocationNormalizer, directory: Path) -> None:
    with model_card_kept_up(directory):
        normalizer.save(directory / NORMALIZER_FILE)


def _from_preset(name: str, directory: Path, console: Console) -> LocationNormalizer:
    card = RewardModelCard.load(directory)
    normalizer = LocationNormalizer.from_preset(name, fingerprint=card.fingerprint, rule=card.segmentation.label)
    _save(normalizer, directory)
    console.print(f"Normalizer {name}, as released, written to {directory / NORMALIZER_FILE}")
    return normalizer


def _report(normalizer: LocationNormalizer, units: int, pairs: int, console: Console) -> None:
    low, high = normalizer.fitted_range or (0.0, 1.0)
    r2 = {key: "n/a" if value is None else f"{value:.3f}" for key, value in normalizer.r2.items()}
    console.print(f"{units} unit rewards of {2 * pairs} responses, locations {low:.4f} to {high:.2f}")
    console.print(f"Mean(p) = {normalizer.w_mu:+.4f} ln p {normalizer.b_mu:+.4f}   R² {r2['mean']}")
    console.print(
        f"Std(p)  = {normalizer.w_sigma:+.4f} ln p {normalizer.b_sigma:+.4f}   R² {r2['std']}   "
        f"(never below {normalizer.std_floor:.4f})"
    )
    table = Table("location", "units", "mean", "residual", "std", "residual", title="Fit by location")
    step = max(1, len(normalizer.bins) // 8)
    for point in normalizer.bins[::step]:
        table.add_row(
            f"{point.location:.3f}",
            str(point.count),
            f"{point.mean:+.3f}",
            f"{point.mean - normalizer.mean(point.location):+.3f}",
            f"{point.std:.3f}",
            f"{point.std - normalizer.std(point.location):+.3f}",
        )
    console.print(table)


def plot_fit(normalizer: LocationNormalizer, path: Path) -> None:
    """Draw binned means and spreads against location with the fitted curves."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    places = [point.location for point in normalizer.bins]
    curve = [p / 200 for p in range(max(1, int(200 * min(places))), 201)]
    for name, fitted, marker in (("mean", normalizer.mean, "o"), ("std", normalizer.std, "^")):
        (line,) = axes.plot(curve, [float(fitted(p)) for p in curve], label=f"{name}(p), fitted")
        observed = [getattr(point, name) for point in normalizer.bins]
        axes.plot(places, observed, marker, color=line.get_color(), ms=3, alpha=0.6, label=f"{name}, binned")
    axes.set(xlabel="location p = unit / units", ylabel="reward", title=f"Rewards by location, {normalizer.rule}")
    axes.legend()
    figure.savefig(path)


def main(argv: list[str]) -> None:
    """Run `segrew calibrate`."""
    config, options = parse("calibrate", (CalibrationConfig, DataOptions), argv)
    calibrate(config, options=options)
