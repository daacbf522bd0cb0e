"""The texts of the experiment, read once: what the lower layers make of every token, and the frozen trunk's states.

LoRA on the upper layers alone leaves the lower ones as they are, so every arm and seed starts from the same states.
"""

import copy
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reward_models.benchmark_items import Item
from reward_models.benchmark_readers import marked_item, read_items, rewardbench_item
from reward_models.checkpoints import load_classifier
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches, statistics_of_states
from segrew.encoding import EncodedAnswer, conversations_of, encode_answer, encode_pairs
from segrew.language_models import trunk_of
from segrew.packed_attention import packed_states
from segrew.preferences import PreferencePair, load_preferences
from segrew.sources import prompt_key


@dataclass(frozen=True)
class Texts:
    """Rows of one part of the experiment, two a pair where it has pairs.

    Args:
        items: pairs or marked answers, one an item.
        rows: token ids. answers: the text of each row.
    """

    items: list[Any]
    rows: Conversations
    answers: list[str]


def _texts(items: list[Item], chat: ChatFormat, max_length: int) -> Texts:
    encoded: list[EncodedAnswer] = []
    for item in items:
        for text in item.answers:
            answer = encode_answer(item.prompt, text, chat, max_length)
            assert answer is not None
            encoded.append(answer)
    ended = torch.tensor([answer.ended for answer in encoded])
    rows = Conversations([a.prompt for a in encoded], [a.response for a in encoded], ended)
    return Texts(items, rows, [text for item in items for text in item.answers])


def stratified(items: list[Item], count: int) -> list[Item]:
    """Draw rows so that each subset keeps its share."""
    subsets: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        subsets[item.subset].append(item)
    chosen = []
    for held in subsets.values():
        random.Random(0).shuffle(held)
        chosen += held[: max(1, round(len(held) * count / len(items)))]
    return chosen


def read_texts(args: Any, chat: ChatFormat) -> dict[str, Texts]:
    """Return the parts train, valid (pairs with other prompts), rewardbench and spans."""
    bench, _ = read_items(args.benchmark, "train", rewardbench_item)
    spans, _ = read_items(args.spans, "train", marked_item)
    known = {prompt_key(item.prompt) for item in (*bench, *spans)}
    pool: list[PreferencePair] = []
    for file, share in zip(args.files, args.shares, strict=True):
        pairs = [pair for pair in load_preferences(file).pairs if prompt_key(pair.prompt) not in known]
        random.Random(0).shuffle(pairs)
        fitting = encode_pairs(pairs[: 4 * share], chat, args.pair_length, "drop")[0]
        pool += fitting[:share]
    prompts = sorted({prompt_key(pair.prompt) for pair in pool})
    random.Random(1).shuffle(prompts)
    held, parts = set(prompts[: len(prompts) // 4]), {}
    for name in ("train", "valid"):
        pairs = [pair for pair in pool if (prompt_key(pair.prompt) in held) == (name == "valid")]
        random.Random(2).shuffle(pairs)
        pairs, encoded, _ = encode_pairs(pairs[: getattr(args, name)], chat, args.pair_length, "drop")
        answers = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
        parts[name] = Texts(pairs, conversations_of(encoded), answers)
    parts["rewardbench"] = _texts(stratified(bench, args.rows), chat, args.bench_length)
    parts["spans"] = _texts(spans, chat, args.spans_length)
    return parts


@dataclass(frozen=True)
class Stored:
    """What the frozen model makes of one part.

    Args:
        lower: states that enter the upper layers, of every token. rows: the conversations as places in it.
        last: states after the last layer at each response token, row after row; entropy, logprobs: [b, t].
    """

    lower: Tensor
    rows: Conversations
    last: Tensor
    entropy: Tensor
    logprobs: Tensor


@torch.no_grad()
def _read(model: Any, rows: Conversations, upper: int, name: str) -> dict[str, Tensor]:
    trunk, caught = trunk_of(model), []
    hook = trunk.layers[-upper].register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][0]))
    offsets = torch.tensor([0, *rows.lengths]).cumsum(0)
    width = max(rows.lengths)
    entropy, logprobs = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    last, lower, done = torch.zeros(int(offsets[-1]), trunk.config.hidden_size, dtype=torch.bfloat16), [], 0
    places: list[list[int]] = [[]] * len(rows)
    for batch in track(list(micro_batches(rows, 4096)), f"Reading {name}"):
        part = rows.select(batch)
        states, packed = packed_states(trunk, part.prompts, part.responses)
        lower.append(caught.pop().bfloat16())
        before = []
        for k, row in enumerate(batch):
            path, prompt = packed.paths[k], len(part.prompts[k])
            places[row] = [done + i for i in path]
            last[offsets[row] : offsets[row + 1]] = states[path[prompt:]].bfloat16()
            before.append(states[path[prompt - 1 : -1]])
        found = statistics_of_states(model, torch.cat(before), part)
        for whole, some in zip((logprobs, entropy), found, strict=True):
            whole[batch, : some.shape[1]] = some
        done += len(states)
    hook.remove()
    return {
        "lower": torch.cat(lower), "last": last, "entropy": entropy, "logprobs": logprobs,
        "places": torch.tensor(list(chain.from_iterable(places))),
    }  # fmt: skip


def stored(model: nn.Module, rows: Conversations, upper: int, path: Path, name: str) -> Stored:
    """Read one part, or load what was read before."""
    if not path.exists():
        save_file(_read(model, rows, upper, name), path)
    held = load_file(path)
    sizes = [size for p, t in zip(rows.prompts, rows.lengths, strict=True) for size in (len(p), t)]
    places = [part.tolist() for part in held["places"].split(sizes)]
    as_places = replace(rows, prompts=places[::2], responses=places[1::2])
    return Stored(held["lower"], as_places, held["last"], held["entropy"], held["logprobs"])


class _Lookup(nn.Module):
    """Stands where the embedding was: a token id is a place among stored states."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(0)

    def forward(self, places: Tensor) -> Tensor:
        return self.table[places]


def upper_model(name: str, upper: int) -> Any:
    """Return a classifier of the last layers of a model, which reads stored states; see `use_states`."""
    model: Any = load_classifier(name, new_head=True, dtype=torch.float32)
    trunk = trunk_of(model)
    trunk.layers = trunk.layers[-upper:]
    trunk.embed_tokens = _Lookup()
    trunk.config.num_hidden_layers = upper
    return model


def use_states(model: Any, held: Stored) -> None:
    """Let the model read this part's states."""
    trunk_of(model).embed_tokens.table = held.lower


def merged(model: Any) -> Any:
    """Return a copy in bfloat16 with LoRA merged, its head in float32: the fastest to measure."""
    whole = copy.deepcopy(model).merge_and_unload().bfloat16().eval()
    whole.score.float()
    return whole


def batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield pairs in an order of the seed's own."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    for first in range(0, count, size):
        yield order[first : first + size]


def rows_of(pairs: list[int]) -> list[int]:
    """Rows of the given pairs: two each."""
    return [row for i in pairs for row in (2 * i, 2 * i + 1)]


def fingerprint(args: Any, name: str) -> str:
    """What the stored states of one part depend on."""
    lengths = {"rewardbench": ["rows", "bench_length"], "spans": ["spans_length"]}
    fields = ("model", "upper", *lengths.get(name, ["shares", "train", "valid", "pair_length"]))
    return json.dumps([getattr(args, field) for field in fields])
