"""Processor seconds per 1,000 response tokens of each segmentation rule, on the embedded test pairs.

    python benchmarks/segmentation_rules.py                     # SmolLM2-135M's tokenizer and forward pass
    python benchmarks/segmentation_rules.py --tiny              # a tokenizer and model made on the spot
    python benchmarks/segmentation_rules.py --parser en_core_web_sm

The segmenter's forward pass, which the rules entropy and perplexity read, is a line of its own, as are the texts with
the characters of each token, which every rule but token looks at. Without --parser a pipeline that parses nothing
stands in, so that the line of constituency holds all but the parser. Prints a table and writes --output as JSON.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches, response_statistics
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import everyday_pairs
from segrew.segmentation import RULES, SegmentationConfig, segment
from segrew.tiny_model import make_tiny_model


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Median processor time after one call to warm up: other jobs on the machine hardly change it."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def stand_in_parser(directory: str) -> str:
    """Write a spaCy pipeline that makes chains of eight words."""
    import spacy

    @spacy.Language.component("chains_of_eight")
    def chains(document):
        for word in document:
            word.head, word.dep_ = (document[word.i - 1], "dep") if word.i % 8 else (word, "ROOT")
        return document

    pipeline = spacy.blank("en")
    pipeline.add_pipe("chains_of_eight")
    pipeline.to_disk(directory)
    return directory


def conversations_of(chat: ChatFormat, max_pairs: int | None) -> Conversations:
    """Both answers of the embedded test pairs."""
    pairs = everyday_pairs("test")[:max_pairs]
    prompts = [chat.prompt_ids(pair.prompt) for pair in pairs for _ in range(2)]
    responses = [chat.response_ids(text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    return Conversations(prompts, responses, torch.ones(len(responses), dtype=torch.bool))


@torch.no_grad()
def forward_pass(model: torch.nn.Module, conversations: Conversations) -> None:
    """What the rules that need a model wait for."""
    for rows in micro_batches(conversations, None, max_rows=16):
        response_statistics(model, conversations.select(rows))


def time_rules(chat: ChatFormat, parser: str, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds per 1,000 tokens of each rule, texts included, and the mean length of its units."""
    conversations = conversations_of(chat, None)
    mask, thousands = conversations.mask, sum(conversations.lengths) / 1000
    draw = torch.Generator().manual_seed(0)
    signal = -torch.log(torch.rand(mask.shape, generator=draw).clamp(min=1e-6))
    inputs = {"entropy": signal, "logprobs": -signal, "ended": conversations.ended, "generator": draw}
    texts = chat.response_texts(conversations.responses)
    results = {}
    for name in RULES:
        rule = SegmentationConfig(name, threshold=1.5 if name == "entropy" else None, parser=parser)
        cut = segment(rule, mask, texts=texts, **inputs)
        seconds = median_seconds(lambda rule=rule: segment(rule, mask, texts=texts, **inputs), repeats)
        length = float(cut.lengths[cut.unit_mask].float().mean())
        results[name] = {"seconds_per_1000_tokens": seconds / thousands, "tokens_a_unit": length}
    seconds = median_seconds(lambda: [text.continues for text in texts], repeats)
    results["(texts alone)"] = {"seconds_per_1000_tokens": seconds / thousands}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parser", help="name or path of a spaCy pipeline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default=str(Path(__file__).with_suffix(".json")))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        name = str(make_tiny_model(Path(directory) / "model", steps=0)) if args.tiny else EMBEDDED_MODEL
        chat = ChatFormat.from_tokenizer(load_tokenizer(name))
        results = time_rules(chat, args.parser or stand_in_parser(f"{directory}/parser"), args.repeats)
        model, some = load_causal_lm(name), conversations_of(chat, 20)
        seconds = median_seconds(lambda: forward_pass(model, some), 1) / (sum(some.lengths) / 1000)
        results["(segmenter's forward pass)"] = {"seconds_per_1000_tokens": seconds}
    for rule, row in results.items():
        length = f"{row['tokens_a_unit']:8.2f} tokens a unit" if "tokens_a_unit" in row else ""
        print(f"{rule:28}{1000 * row['seconds_per_1000_tokens']:10.2f} ms{length}")
    record = {
        "model": "tiny" if args.tiny else name,
        "parser": args.parser or "none: a stand-in that parses nothing",
        "responses": 2 * len(everyday_pairs("test")),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
        "results": results,
    }
    Path(args.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
