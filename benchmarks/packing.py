"""Packed, prefix-shared rows beside padded rows in file order: scoring, and training steps with LoRA, in float32.

    python benchmarks/packing.py --dataset pairs.jsonl     # 200 pairs on SmolLM2-135M
    python benchmarks/packing.py --pairs 48 --steps 5
    python benchmarks/packing.py --quick                   # a tiny model, under a minute: checks the benchmark

The padded side is stock transformers: pairs in file order, eight at a time (four in training), right-padded to the
longest, one forward pass. Both sides take turns on the same pairs in one process, and their scores and gradients are
compared. Prints a table and writes it to --output as JSON.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from reward_models.checkpoints import load_classifier
from reward_models.losses import preference_loss
from reward_models.pairs import conversations_of
from reward_models.reading import read_head
from segrew.aggregation import aggregate
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches, response_states
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.encoding import encode_pairs
from segrew.language_models import load_tokenizer, plain_model, trunk_of
from segrew.preferences import EMBEDDED_PAIRS, load_preferences
from segrew.segmentation import Segmentation, segment_by_ngram
from segrew.tiny_model import make_tiny_model

UNIT, MAX_LENGTH = 5, 1024
SCORED, TRAINED = 8, 4  # pairs of one padded pass; eight with their gradients need 18 GB


def units_of(rows: Conversations) -> Segmentation:
    return segment_by_ngram(rows.mask, UNIT)


def read(model: Any, states: Tensor, rows: Conversations) -> Tensor:
    """Mean reward over units of five tokens, from the states after each token: the same for both sides."""
    units = units_of(rows)
    rewards = read_head(plain_model(model).score, states).gather(1, units.ends)
    return aggregate(rewards, units.unit_mask, kind="mean")


def packed(model: Any, rows: Conversations) -> Tensor:
    states = response_states(model, rows, layout="packed")
    return read(model, states.spread(states.at), rows)


def padded(model: Any, rows: Conversations) -> Tensor:
    """One stock pass over rows padded on the right."""
    joined = [p + r for p, r in zip(rows.prompts, rows.responses, strict=True)]
    width, longest = max(map(len, joined)), max(rows.lengths)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in joined])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in joined])
    states = trunk_of(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    starts = torch.tensor([len(prompt) for prompt in rows.prompts])
    columns = (starts[:, None] + torch.arange(longest)).clamp(max=width - 1)
    return read(model, states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1])), rows)


def in_file_order(rows: Conversations, pairs: int) -> list[Conversations]:
    """Rows of a few pairs at a time."""
    return [rows.select(list(range(i, min(i + 2 * pairs, len(rows))))) for i in range(0, len(rows), 2 * pairs)]


def timed(run: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Wall seconds and this process's CPU seconds, which other jobs on the machine stretch less."""
    begin = time.perf_counter(), time.process_time()
    result = run()
    return (time.perf_counter() - begin[0], time.process_time() - begin[1]), result


def scores_packed(model: Any, rows: Conversations) -> Tensor:
    scores = torch.zeros(len(rows))
    for batch in micro_batches(rows):
        scores[batch] = packed(model, rows.select(batch))
    return scores


def scores_padded(model: Any, rows: Conversations) -> Tensor:
    return torch.cat([padded(model, part) for part in in_file_order(rows, SCORED)])


@torch.no_grad()
def scoring_line(model: Any, rows: Conversations, pairs: int) -> dict[str, Any]:
    """Score all rows, the two sides by turns on so many pairs each."""
    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    gap = 0.0
    for part in track(in_file_order(rows, pairs), "Scoring"):
        seconds, found = timed(lambda part=part: scores_packed(model, part))
        ours.append(seconds)
        seconds, expected = timed(lambda part=part: scores_padded(model, part))
        plain.append(seconds)
        gap = max(gap, float((found - expected).abs().max()))
    return line(f"scoring {len(rows) // 2} pairs", plain, ours, 3.0, gap)


def with_lora(model: Any) -> Any:
    """LoRA on all linear layers, past its start, where half of its gradients are zero."""
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.002)
    return model.train()


def training_line(model: Any, rows: Conversations, steps: int) -> dict[str, Any]:
    """Forward, backward and an AdamW step at learning rate 0, so that both sides see the same weights."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.0, weight_decay=0.0)

    def step(form: Callable[[Any, Conversations], Tensor], part: Conversations) -> Tensor:
        optimizer.zero_grad()
        scores = form(model, part)
        preference_loss(scores[0::2], scores[1::2]).backward()
        optimizer.step()
        return torch.cat([weight.grad.flatten() for weight in learning if weight.grad is not None])

    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    gap = 0.0
    for part in track(in_file_order(rows, TRAINED)[:steps], "Training"):
        seconds, found = timed(lambda part=part: step(packed, part))
        ours.append(seconds)
        seconds, expected = timed(lambda part=part: step(padded, part))
        plain.append(seconds)
        gap = max(gap, float((found - expected).norm() / expected.norm()))
    return line(f"LoRA step of {TRAINED} pairs", plain, ours, 2.2, gap)


def line(name: str, plain: list, ours: list, target: float, gap: float) -> dict[str, Any]:
    (padded_s, padded_cpu), (packed_s, packed_cpu) = (
        [sum(x) for x in zip(*side, strict=True)] for side in (plain, ours)
    )
    speedup = padded_s / packed_s
    return {
        "name": name,
        "turns": len(ours),
        "padded_s": round(padded_s, 2),
        "packed_s": round(packed_s, 2),
        "speedup": round(speedup, 2),
        "median_of_turns": round(statistics.median(a[0] / b[0] for a, b in zip(plain, ours, strict=True)), 2),
        "cpu_time_ratio": round(padded_cpu / packed_cpu, 2),
        "largest_difference": gap,
        "target": f"≥ {target}x, equal to 1e-4",
        "met": speedup >= target and gap <= 1e-4,
    }


def tokens_of(rows: Conversations) -> dict[str, int]:
    """Tokens that each side runs over when it scores."""
    sizes = [
        [len(p) + len(r) for p, r in zip(x.prompts, x.responses, strict=True)] for x in in_file_order(rows, SCORED)
    ]
    prompts = {tuple(prompt) for prompt in rows.prompts}
    return {
        "padded": sum(len(step) * max(step) for step in sizes),
        "without padding": sum(map(sum, sizes)),
        "packed": sum(map(len, prompts)) + sum(rows.lengths),
    }


def load(dataset: str, pairs: int, model_name: str) -> tuple[Any, Conversations]:
    chat = ChatFormat.from_tokenizer(load_tokenizer(model_name))
    kept = load_preferences(dataset, "train").pairs[:pairs]
    torch.manual_seed(0)
    model = load_classifier(model_name, new_head=True, dtype=torch.float32).eval()
    return model, conversations_of(encode_pairs(kept, chat, MAX_LENGTH, keep_identical=True)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default=EMBEDDED_PAIRS, help="preference pairs: a file, or the embedded ones")
    parser.add_argument("--pairs", type=int, default=200, help="pairs that are scored")
    parser.add_argument("--steps", type=int, default=7, help="training steps")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 24 pairs; targets are for the full run")
    parser.add_argument("--output", default="benchmarks/packing.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = str(make_tiny_model(folder, steps=0)) if arguments.quick else EMBEDDED_MODEL
        model, rows = load(arguments.dataset, 24 if arguments.quick else arguments.pairs, name)
    for form in (packed, padded):
        with torch.no_grad():
            form(model, rows.select([0, 1]))  # what a first call costs is no part of it
    lines = []
    for make in (
        lambda: scoring_line(model, rows, max(SCORED, len(rows) // 10)),
        lambda: training_line(with_lora(model), rows, arguments.steps),
    ):
        lines.append(make())
        print(json.dumps(lines[-1], ensure_ascii=False), flush=True)
    record = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "quick": arguments.quick,
        "dataset": Path(arguments.dataset).name,
        "tokens": tokens_of(rows),
        "lines": lines,
    }
    Path(arguments.output).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table = Table("", "padded", "packed", "ratio", "median turn", "largest difference", "target")
    for entry in lines:
        verdict = f"{entry['target']}: {'met' if entry['met'] else 'MISSED'}"
        seconds = (f"{entry['padded_s']} s", f"{entry['packed_s']} s", f"{entry['speedup']}x")
        table.add_row(
            entry["name"], *seconds, f"{entry['median_of_turns']}x", f"{entry['largest_difference']:.1e}", verdict
        )
    Console(width=140).print(table)
    print(f"Tokens of scoring: {record['tokens']}; written to {arguments.output}")


if __name__ == "__main__":
    main()
