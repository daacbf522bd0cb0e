"""Fit the location normalizer of a reward model on its own unit rewards (`segrew calibrate`)."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from reward_models.calibration_report import plot_fit, print_fit
from reward_models.card import RewardModelCard
from reward_models.checkpoints import find_checkpoint
from reward_models.length_bias import length_bias
from reward_models.location_fit import Link, Regression
from reward_models.model_card import model_card_kept_up
from reward_models.normalizer_parameters import Mode
from reward_models.normalizers import LocationBy, LocationNormalizer
from reward_models.pairs import SegmentedPairs, readings_of, segment_for
from reward_models.segment_reward_model import NORMALIZER_FILE, SegmentRewardModel
from segrew.config import arg, parse
from segrew.data_options import DataOptions
from segrew.language_models import TOKENS_PER_BATCH
from segrew.preferences import EMBEDDED_PAIRS, LoadedPairs, load_preferences
from segrew.run_directory import write_json
from segrew.sources import DataRecord, write_records
from segrew.text_rules import warn_of_fallbacks

CALIBRATION_FILE = "calibration.json"


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

    preset: str | None = arg(None, help="Take a normalizer released with 2501.02790 instead, such as phi3-mini-1.75.")


def calibrate(
    config: CalibrationConfig, console: Console | None = None, options: DataOptions | None = None
) -> LocationNormalizer:
    """Fit Mean(p) and Std(p) (2501.02790); write `normalizer.json`, `calibration.json` and a picture of the fit.

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
    loaded = _load(config, (options or DataOptions()).for_stage("reward"))
    tokens = config.max_tokens_per_batch
    data = segment_for(reward_model, loaded.pairs, max_tokens=tokens, description="Cutting answers")
    warn_of_fallbacks([data.segmentation])
    normalizer, found = fit_normalizer(reward_model, data, config)
    _save(normalizer, directory)
    write_json(directory / CALIBRATION_FILE, found)
    plot_fit(normalizer, directory / "normalizer.svg")
    record = DataRecord("calibration", "pairs", len(data), loaded.sources, data.fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(directory, [record])
    print_fit(normalizer, found, console)
    console.print(f"Normalizer written to {directory / NORMALIZER_FILE}, picture to normalizer.svg")
    return normalizer


def _load(config: CalibrationConfig, options: DataOptions) -> LoadedPairs:
    limits: dict[str, Any] = {"limit": config.max_pairs if options.streaming else None, "seed": config.seed}
    loaded = load_preferences(config.dataset_name, config.dataset_split, options, **limits)
    if len(loaded.pairs) > config.max_pairs:
        loaded.pairs = random.Random(config.seed).sample(loaded.pairs, config.max_pairs)
    return loaded


def fit_normalizer(
    reward_model: SegmentRewardModel, data: SegmentedPairs, config: CalibrationConfig
) -> tuple[LocationNormalizer, dict[str, Any]]:
    """Read every unit of both answers and fit; beside the normalizer, what `calibration.json` holds."""
    tokens, unit_mask = config.max_tokens_per_batch, data.segmentation.unit_mask
    readings = readings_of(reward_model, data, max_tokens=tokens, description="Reading rewards")
    normalizer = LocationNormalizer(
        fingerprint=reward_model.fingerprint,
        rule=reward_model.segmentation.label,
        mode=config.normalizer,
        regression=config.regression,
        link=config.link,
        location_by=config.location,
    )
    locations = normalizer.locations(data.segmentation)[unit_mask]
    normalizer.fit(readings.rewards[unit_mask], locations, compat=reward_model.segmentation.compat)
    prompts = [place for place in range(len(data)) for _ in range(2)]
    found = {"units": int(unit_mask.sum()), "responses": len(unit_mask), "settings": asdict(config)}
    found["length_bias"] = length_bias(readings.scores.tolist(), data.conversations.lengths, prompts)
    return normalizer, found


def _save(normalizer: LocationNormalizer, directory: Path) -> None:
    with model_card_kept_up(directory):
        normalizer.save(directory / NORMALIZER_FILE)


def _from_preset(name: str, directory: Path, console: Console) -> LocationNormalizer:
    card = RewardModelCard.load(directory)
    normalizer = LocationNormalizer.from_preset(name, fingerprint=card.fingerprint, rule=card.segmentation.label)
    _save(normalizer, directory)
    console.print(f"Normalizer {name}, as released, written to {directory / NORMALIZER_FILE}")
    return normalizer


def main(argv: list[str]) -> None:
    """Run `segrew calibrate`."""
    config, options = parse("calibrate", (CalibrationConfig, DataOptions), argv)
    calibrate(config, options=options)
