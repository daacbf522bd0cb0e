"""What `segrew train-rm` starts from: pairs cut into units by the frozen segmenter, and the card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import TrainingArguments

from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.pairs import SegmentedPairs, segment_pairs
from reward_models.train_config import RewardModelConfig
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint
from segrew.preferences import load_preferences
from segrew.text_rules import warn_of_fallbacks


def load_pairs(config: RewardModelConfig, console: Console) -> tuple[list, list]:
    """Load the pairs to train on and those to evaluate on, which may be none, and say how many there are."""
    splits: list[list] = [[], []]
    sources = [(config.dataset_name, config.dataset_train_split)]
    if config.dataset_test_split or config.eval_dataset_name:
        source = config.eval_dataset_name or config.dataset_name
        if source == config.dataset_name and Path(source).exists():
            console.print("A local file has no splits: no evaluation pairs (name some with --eval_dataset_name).")
        else:
            sources.append((source, config.dataset_test_split or "test"))
    for i, (name, split) in enumerate(sources):
        loaded = load_preferences(name, split)
        splits[i] = loaded.pairs[: config.max_pairs]
        left_out = "".join(f", {count} left out: {reason}" for reason, count in loaded.skipped.items())
        console.print(f"{('Training', 'Evaluation')[i]} pairs: {len(splits[i])} from {name}{left_out}")
    return splits[0], splits[1]


@dataclass(frozen=True)
class Prepared:
    """Everything that each way of training starts from.

    Args:
        segmenter: the frozen model that cut the responses.
        card: how the reward model is read.
        test: pairs to evaluate on, if any.
    """

    chat: ChatFormat
    segmenter: nn.Module
    card: RewardModelCard
    train: SegmentedPairs
    test: SegmentedPairs | None


def _segmenter_name(config: RewardModelConfig) -> str:
    """Name the SFT model that cuts responses: as told, else the model to start from, or what that was made of."""
    start = Path(config.model_name_or_path)
    card = RewardModelCard.load(start) if (start / CARD_FILE).exists() else None
    own_trunk = config.segmenter_name_or_path is not None or (card is not None and not card.trunk_is_segmenter)
    if config.tune == "head" and own_trunk:
        raise ValueError(
            f"--tune head reads the states of the frozen segmenter, and {start} has a trunk of its own; "
            "use --tune lora or full, or start from a language model."
        )
    return config.segmenter_name_or_path or (config.model_name_or_path if card is None else card.base_model)


def _require_same_vocabulary(chat: ChatFormat, segmenter: str) -> None:
    own, other = chat.tokenizer.get_vocab(), load_tokenizer(segmenter).get_vocab()
    different = [token for token in sorted({*own, *other}, key=str) if own.get(token) != other.get(token)]
    if different:
        raise ValueError(
            f"--segmenter_name_or_path {segmenter}: {len(different)} tokens, such as {different[0]!r}, have another id "
            "than in the reward model's tokenizer, so it cannot cut its responses; both need one vocabulary."
        )


def prepare(
    config: RewardModelConfig,
    args: TrainingArguments,
    chat: ChatFormat,
    pairs: tuple[list, list],
    console: Console,
) -> Prepared:
    """Encode and cut both splits, and write down how the reward model will be read."""
    train_pairs, test_pairs = pairs
    base_model = _segmenter_name(config)
    if config.segmenter_name_or_path:
        _require_same_vocabulary(chat, base_model)
    segmenter = load_causal_lm(base_model)
    shared: dict[str, Any] = {
        "max_length": config.max_length,
        "batch_size": args.per_device_eval_batch_size,
        "with_states": config.tune == "head",
        "fingerprint": model_fingerprint(segmenter),
    }
    label = "Segmenting" if config.tune != "head" else "Segmenting and reading"
    train = segment_pairs(train_pairs, chat, config.segmentation(), segmenter, description=f"{label} train", **shared)
    if len(train) < len(train_pairs):
        console.print(f"{len(train_pairs) - len(train)} training pairs left out: identical within --max_length")
    test = None
    if test_pairs:
        test = segment_pairs(test_pairs, chat, train.rule, segmenter, description=f"{label} test ", **shared)
    warn_of_fallbacks(data.segmentation for data in (train, test) if data is not None)
    if train.margins is not None:
        console.print("Column 'margin': each pair's chosen score is to lead by that much")
    lengths = train.segmentation.lengths[train.segmentation.unit_mask].float()
    console.print(
        f"Rule {train.rule.label}: {train.segmentation.counts.float().mean():.1f} units a response, "
        f"{lengths.mean():.2f} tokens a unit"
    )
    card = RewardModelCard(
        segmentation=train.rule,
        base_model=base_model,
        segmenter_fingerprint=shared["fingerprint"],
        tokenizer_fingerprint=chat.fingerprint,
        read_position=config.read_position,
        aggregator=config.aggregator,
        temperature=config.temperature,
        max_length=config.max_length,
        trunk_is_segmenter=config.tune == "head",
    )
    return Prepared(chat, segmenter, card, train, test)
