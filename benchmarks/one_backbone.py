"""Peak memory of PPO with all roles on one base, beside LoRA fine-tuning of the same model on as many tokens.

    python benchmarks/one_backbone.py            # SmolLM2-135M, 16 prompts, 48 tokens each
    python benchmarks/one_backbone.py --quick    # a tiny model: checks the benchmark

Each side runs in a process of its own, on the same number of rows, at most --budget tokens in a forward and backward
pass, in the same precision: LoRA fine-tuning as transformers and peft do it (padded rows, whole logits), the same on
packed rows with logits in chunks, PPO on one base, and PPO with a base for each role and a pass for each reward model,
whose metrics must be the same. Prints a table and writes it to --output as JSON.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ppo_fixture import models, settings
from rich.console import Console
from rich.table import Table

import policy.backbone as backbone
import policy.roles as roles
from policy.ppo import train_policy
from policy.ppo_report import peak_memory_mb
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches, response_statistics
from segrew.language_models import best_dtype, load_causal_lm, load_tokenizer
from segrew.preferences import everyday_pairs

TARGET, CPU = 1.5, torch.device("cpu")


def conversations_of(model: str, rows: int, tokens: int) -> Conversations:
    chat = ChatFormat.from_tokenizer(load_tokenizer(model))
    pairs = everyday_pairs("train")[:rows]
    responses = [chat.response_ids(pair.chosen)[:tokens] for pair in pairs]
    return Conversations([chat.prompt_ids(pair.prompt) for pair in pairs], responses, torch.zeros(len(pairs)).bool())


def stock_loss(model: Any, part: Conversations) -> torch.Tensor:
    """The language-model loss as transformers computes it, on rows padded on the right."""
    joined = [p + r for p, r in zip(part.prompts, part.responses, strict=True)]
    width = max(map(len, joined))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in joined])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in joined])
    labels = ids.masked_fill(mask == 0, -100)
    for row, prompt in enumerate(part.prompts):
        labels[row, : len(prompt)] = -100
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def packed_loss(model: Any, part: Conversations) -> torch.Tensor:
    logprobs, _ = response_statistics(model, part)
    return -logprobs.sum() / sum(part.lengths)


def fine_tune(model_name: str, arguments: argparse.Namespace, loss: Callable[[Any, Conversations], Any]) -> dict:
    """One optimizer step of LoRA on as many rows as a PPO step has, twice."""
    rows = conversations_of(model_name, arguments.prompts, arguments.tokens)
    start = load_causal_lm(model_name, dtype=torch.float32, device=CPU)
    model = backbone.learning(start, settings(model_name, "rm", ""))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(2):
        for part in micro_batches(rows, arguments.budget):
            with torch.autocast("cpu", torch.bfloat16, enabled=best_dtype(CPU) == torch.bfloat16):
                value = loss(model, rows.select(part))
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"peak_mb": peak_memory_mb(CPU)}


def one_ppo(model: str, reward_model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Two PPO steps; what they say, and the memory at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(
            model, reward_model, f"{folder}/run", rollout_batch_size=arguments.prompts, total_steps=2,
            max_new_tokens=arguments.tokens, per_device_train_batch_size=arguments.prompts,
            train_tokens_per_batch=arguments.budget, max_tokens_per_batch=arguments.budget,
        )  # fmt: skip
        path = train_policy(config)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        weights = json.loads((path / "settings.json").read_text())["weights"]
    peak = lines[-1]["memory/peak_mb"]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens", "memory"))} for line in lines]
    times = {name: value for name, value in lines[-1].items() if name.startswith("time/")}
    return {"peak_mb": peak, "metrics": metrics, "weights": weights, "seconds_of_phases": times}


def separate_models() -> None:
    """A base for each role, and a pass for each reward model."""
    backbone.view_of = roles.view_of = copy.deepcopy  # type: ignore[assignment]
    roles.hold_once = lambda *_: None  # type: ignore[assignment]
    roles.Roles.read_along = lambda *_: None  # type: ignore[method-assign, assignment]


def run_side(side: str, model: str, reward_model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    at_start, begin = peak_memory_mb(CPU), time.perf_counter()
    if side == "ppo, a base for each role":
        separate_models()
    losses = {"lora, stock": stock_loss, "lora, packed": packed_loss}
    loss = losses.get(side)
    found = fine_tune(model, arguments, loss) if loss else one_ppo(model, reward_model, arguments)
    return found | {"side": side, "imports_mb": at_start, "seconds": time.perf_counter() - begin}


SIDES = ("lora, stock", "lora, packed", "ppo, one base", "ppo, a base for each role")


def in_its_own_process(side: str, model: str, reward_model: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    command += ["--model", model, "--reward_model", reward_model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{side}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{side}: {found['peak_mb']:,.0f} MB, {found['seconds']:.0f} s", flush=True)
    return found


def difference(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    """The largest relative difference of two runs' metrics."""
    return max(abs(a[k] - b[k]) / max(abs(b[k]), 1.0) for a, b in zip(one, other, strict=True) for k in b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a forward and backward pass")
    parser.add_argument("--quick", action="store_true", help="a tiny model; the target is for the full run")
    parser.add_argument("--output", default="benchmarks/one_backbone.json")
    for name in ("--side", "--model", "--reward_model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_side(arguments.side, arguments.model, arguments.reward_model, arguments)))
        return
    with models(arguments.quick) as (model, reward_model):
        found = {side: in_its_own_process(side, model, reward_model) for side in SIDES}
    stock, packed, shared, separate = (found[side]["peak_mb"] for side in SIDES)
    gap = difference(found[SIDES[2]].pop("metrics"), found[SIDES[3]].pop("metrics"))
    table = Table("", "peak MB", "of the LoRA run", "of the packed one", "s", title="Resident memory at its highest")
    for side, row in found.items():
        ratios = (f"{row['peak_mb'] / stock:.2f}", f"{row['peak_mb'] / packed:.2f}")
        table.add_row(side, f"{row['peak_mb']:,.0f}", *ratios, f"{row['seconds']:.0f}")
    Console(width=110).print(table)
    record = {
        "prompts": arguments.prompts, "tokens": arguments.tokens, "budget": arguments.budget, "quick": arguments.quick,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "dtype": str(best_dtype(CPU)),
        "sides": found, "ratio_to_stock": shared / stock, "ratio_to_packed": shared / packed,
        "ratio_to_separate": shared / separate, "largest_metric_difference": gap, "target": TARGET,
        "met": shared / packed <= TARGET,
    }  # fmt: skip
    Path(arguments.output).write_text(json.dumps(record, indent=1) + "\n")
    verdict = "met" if record["met"] else "MISSED"
    print(f"target {TARGET}x of packed LoRA: {verdict}; metrics of both PPO runs differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
