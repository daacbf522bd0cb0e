"""Fit the location normalizer of a reward model on its own unit rewards (`segrew calibrate`)."""

import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from reward_models.calibration_report import plot_fit, print_fit
from reward_models.card import RewardModelCard
from reward_models.checkpoints import find_checkpoint
from reward_models.length_bias import length_bias
from reward_models.location_fit import Link, Regression
from reward_models.model_card import model_card_kept_up
from reward_models.normalizer_parameters import Mode
from reward_models.normalizers import LocationBy, LocationNormalizer
from reward_models.pairs import readings_of, segment_for
from reward_models.segment_reward_model import NORMALIZER_FILE, SegmentRewardModel
from segrew import processes
from segrew.config import arg, parse
from segrew.conversations import TOKENS_PER_BATCH
from segrew.data_options import DataOptions
from segrew.preferences import EMBEDDED_PAIRS, LoadedPairs, PreferencePair, load_preferences
from segrew.run_directory import write_json
from segrew.segmentation import Compat
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

    def __post_init__(self) -> None:
        if self.preset is None:
            return
        default = CalibrationConfig(self.reward_model)
        unread = [name for name, value in vars(self).items() if name != "preset" and value != getattr(default, name)]
        if unread:
            raise ValueError(
                f"--preset {self.preset}: a released normalizer is taken as it is, and nothing is fitted; leave out "
                f"--{unread[0]}."
            )


def calibrate(
    config: CalibrationConfig, console: Console | None = None, options: DataOptions | None = None
) -> LocationNormalizer:
    """Fit Mean(p) and Std(p) (2501.02790); write `normalizer.json`, `calibration.json` and a picture of the fit.

    Raises:
        ValueError: the reward model or the data cannot be used.
    """
    console, directory = console or Console(quiet=not processes.is_main()), Path(config.reward_model)
    if config.preset is not None:
        return _from_preset(config.preset, directory, console)
    if directory != find_checkpoint(directory):
        raise ValueError(
            f"{directory} is on the hub; download it, for {NORMALIZER_FILE} is written into its directory."
        )
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    loaded = _load(config, (options or DataOptions()).for_stage("reward"))
    own, normalizer = processes.share(loaded.pairs), _unfitted(config, reward_model)
    read = processes.joined(read_rewards(reward_model, own, normalizer, config) if own else None, torch.device("cpu"))
    found = fit_normalizer(normalizer, read, config, compat=reward_model.segmentation.compat)
    if not processes.is_main():
        return processes.from_main(normalizer)
    _save(normalizer, directory)
    write_json(directory / CALIBRATION_FILE, found)
    plot_fit(normalizer, directory / "normalizer.svg")
    record = DataRecord("calibration", "pairs", len(read.lengths) // 2, loaded.sources, Counter(read.fitted))
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(directory, [record])
    print_fit(normalizer, found, console)
    console.print(f"Normalizer written to {directory / NORMALIZER_FILE}, picture to normalizer.svg")
    return processes.from_main(normalizer)


def _load(config: CalibrationConfig, options: DataOptions) -> LoadedPairs:
    limits: dict[str, Any] = {"limit": config.max_pairs if options.streaming else None, "seed": config.seed}
    loaded = load_preferences(config.dataset_name, config.dataset_split, options, **limits)
    if len(loaded.pairs) > config.max_pairs:
        loaded.pairs = random.Random(config.seed).sample(loaded.pairs, config.max_pairs)
    return loaded


def _unfitted(config: CalibrationConfig, reward_model: SegmentRewardModel) -> LocationNormalizer:
    return LocationNormalizer(
        fingerprint=reward_model.fingerprint,
        rule=reward_model.segmentation.label,
        mode=config.normalizer,
        regression=config.regression,
        link=config.link,
        location_by=config.location,
    )


@dataclass(frozen=True)
class UnitRewards:
    """What the fit is made from.

    Args:
        rewards, locations: of every unit, raw. scores, lengths: of every answer, both sides of a pair in turn.
        fitted: a reason for each pair that was left out or cut to fit.
    """

    rewards: Float[Tensor, " n"]
    locations: Float[Tensor, " n"]
    scores: Float[Tensor, " b"]
    lengths: list[int]
    fitted: list[str]


def read_rewards(
    reward_model: SegmentRewardModel,
    pairs: list[PreferencePair],
    normalizer: LocationNormalizer,
    config: CalibrationConfig,
) -> UnitRewards:
    """Cut both answers of each pair and read every unit."""
    tokens = config.max_tokens_per_batch
    data = segment_for(reward_model, pairs, max_tokens=tokens, description=processes.label("Cutting answers"))
    warn_of_fallbacks([data.segmentation])
    readings = readings_of(reward_model, data, max_tokens=tokens, description=processes.label("Reading rewards"))
    unit_mask = data.segmentation.unit_mask
    locations = normalizer.locations(data.segmentation)[unit_mask]
    lengths, fitted = data.conversations.lengths, list(data.fitted.elements())
    return UnitRewards(readings.rewards[unit_mask], locations, readings.scores, lengths, fitted)


def fit_normalizer(
    normalizer: LocationNormalizer, read: UnitRewards, config: CalibrationConfig, *, compat: Compat | None
) -> dict[str, Any]:
    """Fit the normalizer; return what `calibration.json` holds."""
    normalizer.fit(read.rewards, read.locations, compat=compat)
    prompts = [place // 2 for place in range(len(read.lengths))]
    found = {"units": len(read.rewards), "responses": len(read.lengths), "settings": asdict(config)}
    return found | {"length_bias": length_bias(read.scores.tolist(), read.lengths, prompts)}


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
