"""Cut responses into units and show what a threshold does (`segrew segment`)."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from segrew.chat import ChatFormat
from segrew.config import arg, parse, to_dict
from segrew.data_options import DataOptions
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.encoding import Overlong, conversations_of, encode_pairs
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import EMBEDDED_PAIRS, load_preferences
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.segmentation import SegmentationConfig, segment
from segrew.segmenter import response_features
from segrew.sources import DataRecord, write_records

_QUANTILES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass
class SegmentConfig:
    """Which model cuts which responses, and how."""

    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Frozen causal model whose entropies cut the responses.")
    dataset_name: list[str] | str = arg([EMBEDDED_PAIRS], help="Preference pairs whose answers are cut.")
    dataset_split: str = arg("test", help="Split of it.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    rule: Literal["entropy", "token", "response", "ngram", "perplexity"] = arg("entropy", help="Where units end.")
    threshold: float | None = arg(None, help="Entropy (nats) above which a token opens a unit.")
    quantile: float | None = arg(None, help="The threshold as a quantile of the model's own entropy (default 0.8).")
    target_length: float | None = arg(None, help="The threshold that gives units of this mean length, in tokens.")
    n: int = arg(5, help="Tokens a unit, for the n-gram rule.")
    max_length: int = arg(1024, help="Tokens of prompt and response together.")
    overlong: Overlong = arg("truncate_prompt_left", help="What becomes of more tokens: what is cut first, or neither.")
    max_pairs: int | None = arg(None, help="Use at most so many pairs: the first, or a draw from several sets.")
    seed: int = arg(0, help="Of the draw from several data sets.")
    per_device_eval_batch_size: int = arg(16, help="Responses at a time.")
    output_dir: str = arg("runs/segments", help="Where segments.jsonl goes.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")


def main(argv: list[str]) -> None:
    """Run `segrew segment`."""
    config, options = parse("segment", (SegmentConfig, DataOptions), argv)
    console = Console()
    rule = SegmentationConfig(
        rule=config.rule,
        threshold=config.threshold,
        quantile=config.quantile,
        target_length=config.target_length,
        n=config.n,
    )
    loaded = load_preferences(
        config.dataset_name, config.dataset_split, options, limit=config.max_pairs, seed=config.seed
    )
    chat = ChatFormat.from_tokenizer(load_tokenizer(config.model_name_or_path), config.chat_template)
    pairs, encoded, fitted = encode_pairs(loaded.pairs, chat, config.max_length, config.overlong)
    if not pairs:
        raise ValueError(f"--max_length {config.max_length}: none of {len(loaded.pairs)} pairs is left; raise it.")
    model = load_causal_lm(config.model_name_or_path)
    run = RunDirectory.create(
        config.output_dir, command="segment", config=to_dict(config, options), overwrite=config.overwrite_output_dir
    )
    record = DataRecord("segmented", "pairs", len(pairs), loaded.sources, fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(run.path, [record])
    texts = [None if pair.ids else text for pair in pairs for text in (pair.chosen, pair.rejected)]
    conversations = conversations_of(encoded)
    features = response_features(
        model,
        conversations,
        batch_size=config.per_device_eval_batch_size,
        description="Reading entropies",
    )
    mask, ended = conversations.mask, conversations.ended
    rule = rule.resolve(features.entropy, mask)
    cut = segment(rule, mask, entropy=features.entropy, logprobs=features.logprobs, ended=ended)
    rows = []
    for b, text in enumerate(texts):
        ends = cut.ends[b, : int(cut.counts[b])].tolist()
        ids = conversations.responses[b]
        offsets, text = chat.cut_text(ids, ends, text), chat.decode(ids) if text is None else text
        units = [{"text": text[start:stop], "start": start, "end": stop} for start, stop in offsets]
        entropy = [round(value, 4) for value in features.entropy[b, : len(ids)].tolist()]
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
