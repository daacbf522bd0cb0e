"""Cut responses into units and show how long they are (`segrew segment`)."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from segrew.chat import ChatFormat
from segrew.config import arg, parse, to_dict
from segrew.conversations import TOKENS_PER_BATCH, Conversations
from segrew.data_options import DataOptions
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.encoding import Overlong, conversations_of, encode_pairs, require_room
from segrew.language_models import load_causal_lm, load_tokenizer, require_context
from segrew.preferences import EMBEDDED_PAIRS, PreferencePair, load_preferences
from segrew.rule_flags import RuleFlags
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.segmentation import Segmentation, segment
from segrew.segmenter import ResponseFeatures, response_features
from segrew.sources import DataRecord, write_records
from segrew.text_rules import warn_of_fallbacks
from segrew.unit_lengths import UnitLengths, length_table, over_thresholds, plot_lengths


@dataclass
class SegmentConfig(RuleFlags):
    """Which model cuts which responses, and how."""

    model_name_or_path: str = arg(
        EMBEDDED_MODEL, help="Frozen causal model whose entropies cut the responses; other rules use its tokenizer."
    )
    dataset_name: list[str] | str = arg([EMBEDDED_PAIRS], help="Preference pairs whose answers are cut.")
    dataset_split: str = arg("test", help="Split of it.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    max_length: int = arg(1024, help="Tokens of prompt and response together.")
    overlong: Overlong = arg("truncate_prompt_left", help="What becomes of more tokens: what is cut first, or neither.")
    max_pairs: int | None = arg(None, help="Use at most so many pairs: the first, or a draw from several sets.")
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")
    seed: int = arg(0, help="Of the rule random_ngram, and of a draw from several data sets.")
    output_dir: str | None = arg(None, help="Write segments.jsonl and lengths.svg here; default: only the table.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")

    def __post_init__(self) -> None:
        require_room(self.max_length)
        self.segmentation().software()  # refuses what is wrong or not installed


def main(argv: list[str]) -> None:
    """Run `segrew segment`."""
    config, options = parse("segment", (SegmentConfig, DataOptions), argv)
    console, rule = Console(), config.segmentation()
    claim: dict[str, Any] = {
        "command": "segment", "config": to_dict(config, options), "overwrite": config.overwrite_output_dir
    }  # fmt: skip
    if config.output_dir:
        RunDirectory(config.output_dir).check(**claim)
    limits: dict[str, Any] = {"limit": config.max_pairs, "seed": config.seed}
    loaded = load_preferences(config.dataset_name, config.dataset_split, options, **limits)
    chat = ChatFormat.from_tokenizer(load_tokenizer(config.model_name_or_path), config.chat_template)
    pairs, encoded, fitted = encode_pairs(loaded.pairs, chat, config.max_length, config.overlong)
    if not pairs:
        raise ValueError(f"--max_length {config.max_length}: none of {len(loaded.pairs)} pairs is left; raise it.")
    model = load_causal_lm(config.model_name_or_path) if rule.needs_model else None
    if model is not None:
        require_context(model, config.max_length, config.model_name_or_path)
    record = DataRecord("segmented", "pairs", len(pairs), loaded.sources, fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    conversations = conversations_of(encoded)
    mask, ended, texts = conversations.mask, conversations.ended, chat.response_texts(conversations.responses)
    inputs: dict[str, Any] = {"generator": torch.Generator().manual_seed(config.seed)}
    features = None
    if model is not None:
        tokens = config.max_tokens_per_batch
        features = response_features(model, conversations, max_tokens=tokens, description="Reading entropies")
        inputs |= {"entropy": features.entropy, "logprobs": features.logprobs}
        rule = rule.resolve(features.entropy, mask)
    cut = segment(rule, mask, texts=texts, ended=ended, **inputs)
    warn_of_fallbacks([cut])
    chosen, others = UnitLengths.of(rule, cut), []
    if features is not None and rule.rule == "entropy":
        others = over_thresholds(features.entropy, mask, ended, texts)
    console.print(f"{rule.label}: {int(cut.counts.sum())} units, {chosen.mean:.2f} tokens each, {len(texts)} responses")
    console.print(length_table(chosen, others))
    if not config.output_dir:
        console.print(
            "Nothing is written; --output_dir keeps the units of each response and a picture of their lengths."
        )
        return
    run = RunDirectory.create(config.output_dir, **claim)
    write_records(run.path, [record])
    write_jsonl(run.path / "segments.jsonl", _rows(pairs, chat, conversations, cut, features))
    run.write_json("segmentation.json", rule.to_dict())
    plot_lengths(cut, chosen, others, run.path / "lengths.svg")
    console.print(f"Units written to {run.path / 'segments.jsonl'}, their lengths drawn in lengths.svg")


def _rows(
    pairs: list[PreferencePair],
    chat: ChatFormat,
    conversations: Conversations,
    cut: Segmentation,
    features: ResponseFeatures | None,
) -> list[dict[str, Any]]:
    rows = []
    for b, ids in enumerate(conversations.responses):
        side = ("chosen", "rejected")[b % 2]
        pair = pairs[b // 2]
        text = getattr(pair, side)
        count = int(cut.counts[b])
        offsets = chat.cut_text(ids, cut.ends[b, :count].tolist(), None if pair.ids else text)
        units = [
            {"text": text[start:stop], "start": start, "end": stop, "tokens": tokens}
            for (start, stop), tokens in zip(offsets, cut.lengths[b, :count].tolist(), strict=True)
        ]
        row = {"id": pair.id, "side": side, "units": units}
        if features is not None:
            row["entropy"] = [round(value, 4) for value in features.entropy[b, : len(ids)].tolist()]
        rows.append(row)
    return rows
