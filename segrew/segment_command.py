"""Cut responses into units and show what a threshold does (`segrew segment`)."""

from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from segrew.chat import ChatFormat
from segrew.config import arg, parse, to_dict
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import TOKENS_PER_BATCH, Conversations, load_causal_lm, load_tokenizer
from segrew.preferences import EMBEDDED_PAIRS, load_preferences
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.segmentation import SegmentationConfig, segment
from segrew.segmenter import response_features

_QUANTILES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass
class SegmentConfig:
    """Which model cuts which responses, and how."""

    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Frozen causal model whose entropies cut the responses.")
    dataset_name: str = arg(EMBEDDED_PAIRS, help="Preference pairs whose answers are cut.")
    dataset_split: str = arg("test", help="Split of it.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    rule: Literal["entropy", "token", "response", "ngram", "perplexity"] = arg("entropy", help="Where units end.")
    threshold: float | None = arg(None, help="Entropy (nats) above which a token opens a unit.")
    quantile: float | None = arg(None, help="The threshold as a quantile of the model's own entropy (default 0.8).")
    target_length: float | None = arg(None, help="The threshold that gives units of this mean length, in tokens.")
    n: int = arg(5, help="Tokens a unit, for the n-gram rule.")
    max_pairs: int | None = arg(None, help="Use only the first pairs.")
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")
    output_dir: str = arg("runs/segments", help="Where segments.jsonl goes.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")


def main(argv: list[str]) -> None:
    """Run `segrew segment`."""
    (config,) = parse("segment", (SegmentConfig,), argv)
    console = Console()
    rule = SegmentationConfig(
        rule=config.rule,
        threshold=config.threshold,
        quantile=config.quantile,
        target_length=config.target_length,
        n=config.n,
    )
    pairs = load_preferences(config.dataset_name, config.dataset_split).pairs[: config.max_pairs]
    chat = ChatFormat.from_tokenizer(load_tokenizer(config.model_name_or_path), config.chat_template)
    model = load_causal_lm(config.model_name_or_path)
    run = RunDirectory.create(
        config.output_dir, command="segment", config=to_dict(config), overwrite=config.overwrite_output_dir
    )
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    prompts = [chat.prompt_ids(pair.prompt) for pair in pairs for _ in range(2)]
    responses = [chat.response_ids(text) for text in texts]
    conversations = Conversations(prompts, responses, torch.ones(len(texts), dtype=torch.bool))
    features = response_features(
        model,
        conversations,
        max_tokens=config.max_tokens_per_batch,
        description="Reading entropies",
    )
    mask, ended = conversations.mask, conversations.ended
    rule = rule.resolve(features.entropy, mask)
    cut = segment(rule, mask, entropy=features.entropy, logprobs=features.logprobs, ended=ended)
    rows = []
    for b, text in enumerate(texts):
        ends = cut.ends[b, : int(cut.counts[b])].tolist()
        offsets = chat.cut_text(responses[b], ends, text)
        units = [{"text": text[start:stop], "start": start, "end": stop} for start, stop in offsets]
        entropy = [round(value, 4) for value in features.entropy[b, : len(responses[b])].tolist()]
        rows.append({"id": pairs[b // 2].id, "side": ("chosen", "rejected")[b % 2], "units": units, "entropy": entropy})
    write_jsonl(run.path / "segments.jsonl", rows)
    run.write_json("segmentation.json", rule.to_dict())
    lengths = cut.lengths[cut.unit_mask].float()
    console.print(f"{rule.label}: {len(lengths)} units, {lengths.mean():.2f} tokens each, {len(texts)} responses")
    table = Table("quantile", "threshold (nats)", "tokens a unit", title="Other thresholds, from the same pass")
    for quantile in _QUANTILES:
        other = SegmentationConfig(quantile=quantile).resolve(features.entropy, mask)
        cut = segment(other, mask, entropy=features.entropy, ended=ended)
        length = cut.lengths[cut.unit_mask].float().mean()
        table.add_row(f"{quantile:.2f}", f"{other.threshold:.3f}", f"{length:.2f}")
    console.print(table)
    console.print(f"Units written to {run.path / 'segments.jsonl'}")
