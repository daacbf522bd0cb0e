"""Reward models that other programs wrote: their head's name, and how they are to be read without `segrew.json`.

TRL writes the stock layout (head `score`). OpenRLHF and the code of 2501.02790, which comes from it, name the head
by `value_head_prefix` (`score` or `value_head`) and keep mean and std of the score in `config.json`.
"""

import re
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.normalizers import LocationNormalizer
from segrew.chat import ChatFormat
from segrew.language_models import model_fingerprint
from segrew.run_directory import read_json
from segrew.segmentation import SegmentationConfig

_HEAD = re.compile(r"^(?P<prefix>(?:.*\.)?)(?:score|value_head)\.weight$")


def weight_names(directory: Path) -> list[str]:
    """Return the names of the weights in a checkpoint directory; empty where none can be listed."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (directory / index).is_file():
            return sorted(read_json(directory / index)["weight_map"])
    for single in ("model.safetensors", "adapter_model.safetensors"):
        if (directory / single).is_file():
            try:
                with safe_open(directory / single, "pt") as file:
                    return sorted(file.keys())
            except SafetensorError as error:
                raise ValueError(f"{directory / single}: damaged ({error}); copy or train it again.") from None
    if (directory / "pytorch_model.bin").is_file():
        import torch

        return sorted(torch.load(directory / "pytorch_model.bin", mmap=True, weights_only=True, map_location="cpu"))
    return []


def head_renaming(directory: Path) -> dict[str, str] | None:
    """Return patterns that turn a checkpoint's weight names into stock ones; None where they are."""
    names = weight_names(directory)
    heads = [match for name in names if (match := _HEAD.match(name))]
    if not heads or any(match.group() == "score.weight" for match in heads):
        return None
    prefix = heads[0]["prefix"]
    renaming = {rf"^{re.escape(heads[0].group().removesuffix('weight'))}": "score."}
    below = [name for name in names if name != heads[0].group()]
    if prefix and below and all(name.startswith(prefix) for name in below) and not _is_trunk(prefix, below):
        renaming[rf"^{re.escape(prefix)}"] = ""
    return renaming


def _is_trunk(prefix: str, names: list[str]) -> bool:
    """Whether `prefix` is the trunk's own name rather than a wrapper's: then layers come right below it."""
    return any(re.match(rf"^{re.escape(prefix)}(?:layers|h|embed_tokens|wte)\.", name) for name in names)


def card_of(
    name: str,
    config: Any,
    chat: ChatFormat,
    *,
    segmentation: SegmentationConfig | None,
    base_model: str | None,
    segmenter: nn.Module | None,
) -> RewardModelCard:
    """Say how a checkpoint without `segrew.json` is read: as told, or else as one response, at the stop token.

    Raises:
        ValueError: the segmentation needs a model and none is named, or it has no threshold.
    """
    if segmentation is None:
        warnings.warn(
            f"{name} has no {CARD_FILE}, so it is read as an ordinary (bandit) reward model, at the stop token. It "
            "was not trained or calibrated on parts of a response, whose rewards would mean little; for a segment "
            "reward model pass segmentation=…",
            stacklevel=4,
        )
    rule = segmentation or SegmentationConfig(rule="response")
    if rule.needs_model and segmenter is None:
        raise ValueError(
            f"{name}: rule {rule.label} cuts by a language model's entropies; name that model with base_model=…"
        )
    if rule.rule == "entropy" and rule.threshold is None:
        raise ValueError(f"{name}: rule {rule.label} has no threshold in nats; pass SegmentationConfig(threshold=…).")
    return RewardModelCard(
        segmentation=rule,
        base_model=base_model or name,
        segmenter_fingerprint="" if segmenter is None else model_fingerprint(segmenter),
        tokenizer_fingerprint=chat.fingerprint,
        max_length=min(2048, getattr(config.get_text_config(), "max_position_embeddings", None) or 2048),
    )


def score_normalizer(config: Any, card: RewardModelCard) -> LocationNormalizer | None:
    """Return (r − mean) / std of a bandit checkpoint whose config holds both; None for others."""
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if card.segmentation.rule != "response" or mean is None or std is None or (mean, std) == (0, 1):
        return None
    return LocationNormalizer.from_parameters(
        0.0, 0.0, mean, std, fingerprint=card.fingerprint, rule=card.segmentation.label
    )
