"""Say what a data set holds, and show one row as the model sees it (`segrew data`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segrew.chat import ChatFormat, SystemRole
from segrew.config import arg, parse
from segrew.data_options import STAGES, DataOptions
from segrew.dataset_formats import gives_pairs
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.encoding import EncodedPair, Overlong, conversations_of, encode_pairs, require_room
from segrew.language_models import load_tokenizer
from segrew.preferences import EMBEDDED_PAIRS, LoadedPairs, PreferencePair, key_of, load_preferences, longer_wins
from segrew.prompts import LoadedPrompts, encode_prompts, load_prompts
from segrew.rule_flags import RuleFlags
from segrew.run_directory import write_jsonl
from segrew.segmentation import Rule, SegmentationConfig, segment
from segrew.sources import DataRecord, Source, names_of, rows_of, stage_key, stage_of

_MOST = 32_768  # tokens counted of one pair at most
_MOST_UNITS = 20  # shown of the example, besides its last
_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass
class DataConfig(RuleFlags):
    """Which data, in whose tokens, and the units of the example."""

    rule: Rule = arg("sentence", help="Where units of the example end: a rule that needs no model.")

    dataset_name: list[str] | str = arg(
        [EMBEDDED_PAIRS], help="Pairs or prompts: files, directories, hub names, 'everyday'."
    )
    dataset_split: str = arg("train", help="Split of it.")
    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Model whose tokenizer and chat template are used.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    system_role: SystemRole = arg("merge", help="Where the template has none: merge it into the first turn, or refuse.")
    max_length: int = arg(1024, help="Tokens of prompt and response together.")
    overlong: Overlong = arg("truncate_prompt_left", help="What becomes of more tokens: what is cut first, or neither.")
    max_pairs: int | None = arg(None, help="Look at so many rows at most: the first, or a draw from several sets.")
    seed: int = arg(0, help="Of the draw from several data sets.")
    output_file: str | None = arg(None, help="Write the pairs here, as .jsonl in TRL's conversational columns.")

    def __post_init__(self) -> None:
        require_room(self.max_length)
        rule = self.segmentation()
        rule.software()  # refuses what is not installed
        if rule.needs_model:
            raise ValueError(
                f"--rule {self.rule}: cuts by what a model says of the tokens, and `segrew data` runs none; "
                "`segrew segment` does."
            )


def _quantile_table(lengths: dict[str, list[int]]) -> Table:
    table = Table("tokens", "least", "median", "90 %", "99 %", "most")
    for name, values in lengths.items():
        ordered = sorted(values)
        cells = [ordered[round(q * (len(ordered) - 1))] for q in _QUANTILES]
        table.add_row(name, *(f"{value}{'+' if value > _MOST else ''}" for value in cells))
    return table


def _stages(keys: Sequence[str], options: DataOptions) -> str:
    assert options.stage_shares is not None
    counts = Counter(stage_of(key, options.stage_shares) for key in keys)
    return "Stages: " + ", ".join(f"{stage} {counts[stage]}" for stage in STAGES)


def _lengths(encoded: list[EncodedPair]) -> dict[str, list[int]]:
    parts = {
        "prompt": [len(pair.prompts[0]) for pair in encoded],
        "chosen": [len(pair.chosen) for pair in encoded],
        "rejected": [len(pair.rejected) for pair in encoded],
    }
    return parts | {"prompt and longer answer": [p + max(c, r) for p, c, r in zip(*parts.values(), strict=True)]}


def _describe_pairs(pairs: list[PreferencePair]) -> str:
    """Say in a line what is in the pairs besides texts."""
    having = {
        "several turns": sum(sum(m["role"] == "user" for m in pair.prompt) > 1 for pair in pairs),
        "a system message": sum(any(m["role"] == "system" for m in pair.prompt) for pair in pairs),
        "tools": sum("tools" in pair.template for pair in pairs),
        "a margin": sum(pair.margin is not None for pair in pairs),
        "marked faults": sum(bool(pair.faults) for pair in pairs),
    }
    found = "".join(f"; {count} with {what}" for what, count in having.items() if count)
    return f'"The longer answer is the better one" holds in {longer_wins(pairs):.1%}{found}'


def _shortened(text: str, most: int = 800) -> str:
    if len(text) > most:
        text = f"{text[: most // 2]} […] {text[-most // 2 :]}"
    return text.replace("\n", "\\n")


def _example(pair: PreferencePair, encoded: EncodedPair, chat: ChatFormat, rule: SegmentationConfig) -> list[Table]:
    """Lay one pair out as the model sees it: tokens, the mask of what is scored, units and their text."""
    conversations = conversations_of([encoded])
    cut = segment(
        rule,
        conversations.mask,
        texts=chat.response_texts(conversations.responses),
        ended=conversations.ended,
        generator=torch.Generator().manual_seed(0),
    )
    tables = []
    for b, (side, text) in enumerate((("chosen", pair.chosen), ("rejected", pair.rejected))):
        prompt, ids = conversations.prompts[b], conversations.responses[b]
        table = Table("tokens", "mask", "unit", "text", title=side, title_justify="left")
        before = "the same prompt" if b and prompt == conversations.prompts[0] else chat.tokenizer.decode(prompt)
        table.add_row(f"0-{len(prompt) - 1}", "0", "", Text(_shortened(before), style="dim"))
        ends = cut.ends[b, : int(cut.counts[b])].tolist()
        shown = chat.decode(ids) if pair.ids else text
        spans = chat.cut_text(ids, ends, None if pair.ids else text)
        for k, (end, (start, stop)) in enumerate(zip(ends, spans, strict=True)):
            if _MOST_UNITS <= k < len(ends) - 1:
                continue
            words = Text(_shortened(shown[start:stop]), style="bold")
            if encoded.ended[b] and end == len(ids) - 1:
                words.append(chat.tokenizer.decode(ids[-1:]), style="dim")
            first, last = len(prompt) + int(cut.starts[b, k]), len(prompt) + end
            table.add_row(f"{first}-{last}" if first < last else f"{first}", "1", str(k), words)
        tables.append(table)
    return tables


def _show_pairs(
    loaded: LoadedPairs, chat: ChatFormat, config: DataConfig, options: DataOptions, console: Console
) -> None:
    rule = config.segmentation()
    pairs, encoded, fitted = encode_pairs(loaded.pairs, chat, config.max_length, config.overlong)
    console.print(
        str(DataRecord("usable", "pairs", len(pairs), loaded.sources, fitted)),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if options.stage_shares:
        console.print(_stages([key_of(pair) for pair in loaded.pairs], options))
    console.print(_describe_pairs(loaded.pairs), highlight=False)
    _, whole, _ = encode_pairs(loaded.pairs, chat, _MOST, keep_identical=True)
    console.print(_quantile_table(_lengths(whole)))
    if pairs:
        console.print(
            f"\nThe first pair as the model sees it, its units by rule {rule.label}: rewards are read where the mask "
            "is 1, at each unit's end."
        )
        for table in _example(pairs[0], encoded[0], chat, rule):
            console.print(table)


def _show_prompts(
    loaded: LoadedPrompts, chat: ChatFormat, config: DataConfig, options: DataOptions, console: Console
) -> None:
    _, ids, _ = encode_prompts(loaded.prompts, chat, _MOST, "truncate_prompt_left")
    fitted = Counter({"prompts longer than --max_length": sum(len(row) > config.max_length for row in ids)})
    record = DataRecord("usable", "prompts", len(loaded.prompts), loaded.sources, +fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    if options.stage_shares:
        console.print(_stages([stage_key(prompt.messages) for prompt in loaded.prompts], options))
    console.print(_quantile_table({"prompt": [len(row) for row in ids]}))
    first = loaded.prompts[0]
    console.print("\nThe first prompt as the model sees it, and its other columns:")
    console.print(Text(_shortened(chat.tokenizer.decode(ids[0])), style="bold"))
    for column, value in first.columns.items():
        console.print(f"  {column}: {_shortened(str(value), 120)}", highlight=False, markup=False, soft_wrap=True)


def _write(pairs: list[PreferencePair], path: Path, console: Console) -> None:
    """Write pairs in TRL's conversational columns, one a line."""
    rows = []
    for pair in pairs:
        if pair.ids is not None:
            raise ValueError(f"--output_file: {pair.where} holds token ids, which have no text to write.")
        sides = {side: [{"role": "assistant", "content": getattr(pair, side)}] for side in ("chosen", "rejected")}
        others: dict[str, Any] = {"margin": pair.margin, "subset": pair.subset, "chat_template_kwargs": pair.template}
        others["faults"] = [vars(fault) for fault in pair.faults]
        given = {name: value for name, value in others.items() if value not in (None, "", {}, [])}
        rows.append({"id": pair.id, "prompt": pair.prompt, **sides, **given})
    write_jsonl(path, rows)
    console.print(f"{len(rows)} pairs written to {path}")


def main(argv: list[str]) -> None:
    """Run `segrew data`."""
    config, options = parse("data", (DataConfig, DataOptions), argv)
    console, path = Console(), Path(config.output_file) if config.output_file else None
    if path and path.exists():
        raise ValueError(f"--output_file {path} exists; name another file.")
    name = names_of(config.dataset_name)[0]
    first = next(rows_of(Source(name, config.dataset_split), options), None)
    if first is None:
        raise ValueError(f"{name} [{config.dataset_split}]: there is no row to look at.")
    reading: dict[str, Any] = {"limit": config.max_pairs, "seed": config.seed}
    pairs = prompts = None
    if gives_pairs(first[2], first[1]):
        pairs = load_preferences(config.dataset_name, config.dataset_split, options, **reading)
    else:
        prompts = load_prompts(config.dataset_name, config.dataset_split, options, **reading)
    chat = ChatFormat.from_tokenizer(
        load_tokenizer(config.model_name_or_path), config.chat_template, config.system_role
    )
    if prompts is not None:
        _show_prompts(prompts, chat, config, options, console)
    elif pairs is not None:
        _show_pairs(pairs, chat, config, options, console)
        if path:
            _write(pairs.pairs, path, console)
