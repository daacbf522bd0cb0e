"""What `segrew train-rm` starts from: pairs cut into units by the frozen segmenter, and the card."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import TrainingArguments

from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.pairs import SegmentedPairs, segment_pairs
from reward_models.train_config import RewardModelConfig
from segrew.chat import ChatFormat
from segrew.data_options import DataOptions
from segrew.encoding import cutting
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint, require_context
from segrew.preferences import LoadedPairs, key_of, load_preferences
from segrew.records import splits_of
from segrew.sources import DataRecord, names_of, prompt_key, warn_of_shared_prompts
from segrew.text_rules import warn_of_fallbacks


def load_pairs(
    config: RewardModelConfig, options: DataOptions, seed: int, console: Console
) -> tuple[LoadedPairs, LoadedPairs]:
    """Load the pairs to train on and those to evaluate on, which may be none, and say what was read."""
    limits: dict[str, Any] = {"limit": config.max_pairs, "seed": seed}
    train = load_preferences(config.dataset_name, config.dataset_train_split, options.for_stage("reward"), **limits)
    loaded = train, _held_out(config, options, console, limits)
    trained, held_out = ([key_of(pair, prompt_key) for pair in part.pairs] for part in loaded)
    warn_of_shared_prompts(trained, held_out, "pairs")
    for record in data_records(loaded):
        console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    return loaded


def _held_out(config: RewardModelConfig, options: DataOptions, console: Console, limits: dict[str, Any]) -> LoadedPairs:
    """Load the pairs to evaluate on: whole sets, held out already, whatever the parts of the training set."""
    names, split = names_of(config.dataset_name), config.dataset_test_split or "test"
    if config.eval_dataset_name:
        names, options = [config.eval_dataset_name], replace(options, dataset_format=None, dataset_config=None)
    elif config.dataset_test_split is None:
        return LoadedPairs()
    elif unsplit := [name for name in names if Path(name).exists() and split not in splits_of(name)]:
        console.print(f"{unsplit[0]} has no split '{split}': no evaluation pairs (name some with --eval_dataset_name).")
        return LoadedPairs()
    streaming = options.streaming and len(names) == 1
    options = replace(options, dataset_weights=None, stage_split=None, stage=None, streaming=streaming)
    return load_preferences(names, split, options, **limits)


def data_records(
    loaded: tuple[LoadedPairs, LoadedPairs], data: tuple[SegmentedPairs | None, ...] = (None, None)
) -> list[DataRecord]:
    """Say what was read for each role, and once it is encoded, what was left out or cut."""
    records = []
    for role, pairs, cut in zip(("training", "evaluation"), loaded, data, strict=True):
        if pairs.pairs:
            used, fitted = (len(cut), cut.fitted) if cut else (len(pairs.pairs), Counter[str]())
            records.append(DataRecord(role, "pairs", used, pairs.sources, fitted))
    return records


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
    loaded: tuple[LoadedPairs, LoadedPairs],
    console: Console,
) -> Prepared:
    """Encode and cut both splits, and write down how the reward model will be read."""
    train_pairs, test_pairs = (part.pairs for part in loaded)
    base_model = _segmenter_name(config)
    if config.segmenter_name_or_path:
        _require_same_vocabulary(chat, base_model)
    segmenter = load_causal_lm(base_model)
    require_context(segmenter, config.max_length, base_model)
    shared: dict[str, Any] = {
        "max_length": config.max_length,
        "overlong": config.overlong,
        "max_tokens": config.max_tokens_per_batch,
        "with_states": config.tune == "head",
        "fingerprint": model_fingerprint(segmenter),
    }
    label = "Segmenting" if config.tune != "head" else "Segmenting and reading"
    train = segment_pairs(train_pairs, chat, config.segmentation(), segmenter, description=f"{label} train", **shared)
    test = None
    if test_pairs:
        test = segment_pairs(test_pairs, chat, train.rule, segmenter, description=f"{label} test ", **shared)
    warn_of_fallbacks(data.segmentation for data in (train, test) if data is not None)
    for role, data in (("training", train), ("evaluation", test)):
        for reason, count in (data.fitted if data else {}).items():
            console.print(f"{count} {role} {reason}")
    margins = [data.margins for data in (train, test) if data is not None]  # a column with gaps ends here, in either
    if margins[0] is not None:
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
        overlong=cutting(config.overlong),
        trunk_is_segmenter=config.tune == "head",
    )
    return Prepared(chat, segmenter, card, train, test)
