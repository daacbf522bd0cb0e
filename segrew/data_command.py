"""Say what a data set holds, and show one row as the model sees it (`segrew data`)."""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text

from segrew.chat import ChatFormat
from segrew.config import arg, parse
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_tokenizer
from segrew.preferences import EMBEDDED_PAIRS, load_preferences, longer_wins
from segrew.rule_flags import RuleFlags
from segrew.segmentation import Rule, SegmentationConfig, segment


@dataclass
class DataConfig(RuleFlags):
    """Which data, in whose tokens, and the units of the example."""

    rule: Rule = arg("sentence", help="Where units of the example end: a rule that needs no model.")

    dataset_name: str = arg(EMBEDDED_PAIRS, help="Preference pairs: file, directory, hub name, or 'everyday'.")
    dataset_split: str = arg("train", help="Split of it.")
    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Model whose tokenizer and chat template are used.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")

    def __post_init__(self) -> None:
        rule = self.segmentation()
        rule.software()  # refuses what is not installed
        if rule.needs_model:
            raise ValueError(
                f"--rule {self.rule}: cuts by what a model says of the tokens, and `segrew data` runs none; "
                "`segrew segment` does."
            )


def main(argv: list[str]) -> None:
    """Run `segrew data`."""
    (config,) = parse("data", (DataConfig,), argv)
    console, rule = Console(), config.segmentation()
    loaded = load_preferences(config.dataset_name, config.dataset_split)
    pairs = loaded.pairs
    console.print(f"{config.dataset_name}: {len(pairs)} preference pairs")
    for reason, count in loaded.skipped.items():
        console.print(f"  left out: {count} ({reason})")
    chat = ChatFormat.from_tokenizer(load_tokenizer(config.model_name_or_path), config.chat_template)
    sizes = [
        (len(chat.prompt_ids(p.prompt)), len(chat.response_ids(p.chosen)), len(chat.response_ids(p.rejected)))
        for p in pairs
    ]
    for name, values in zip(("prompt", "chosen", "rejected"), zip(*sizes, strict=True), strict=True):
        console.print(f"  {name:9} {sum(values) / len(values):7.1f} tokens on average, {max(values)} at most")
    longer = longer_wins(pairs)
    marked = sum(bool(pair.faults) for pair in pairs)
    console.print(f"  the longer answer is the chosen one in {longer:.1%}; {marked} with marked faults")
    pair = pairs[0]
    console.print(
        f"\nThe first pair as the model sees it: prompt dim, response bold, its units by rule {rule.label} apart:"
    )
    for text in (pair.chosen, pair.rejected):
        shown = Text(chat.tokenizer.decode(chat.prompt_ids(pair.prompt)), style="dim")
        console.print(shown.append_text(_in_units(chat, text, rule)), "\n")


def _in_units(chat: ChatFormat, response: str, rule: SegmentationConfig) -> Text:
    """Return a finished response with every other unit underlined."""
    ids = chat.response_ids(response)
    cut = segment(
        rule,
        torch.ones(1, len(ids), dtype=torch.bool),
        texts=chat.response_texts([ids]),
        ended=torch.ones(1, dtype=torch.bool),
        generator=torch.Generator().manual_seed(0),
    )
    spans = chat.cut_text(ids, cut.ends[0].tolist(), response)
    shown = Text()
    for k, (start, stop) in enumerate(spans):
        shown.append(response[start:stop], style="bold underline" if k % 2 else "bold")
    return shown.append(chat.tokenizer.decode(ids[-1:]), style="bold")
