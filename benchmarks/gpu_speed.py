"""How fast, and whether the fast forms are right: bandwidths, packed rows, bf16, compiling, whole steps."""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import core
import torch
from gpu_outcome import Outcome
from gpu_parity import PHI
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from policy.losses import policy_loss, value_loss
from policy.ppo import train_policy
from policy.ppo_config import PPOConfig
from policy.reward_shaping import spread_rewards
from reward_models.train import train_reward_model
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments
from segrew.advantages import macro_advantages
from segrew.conversations import Conversations, response_states, response_statistics
from segrew.masking import masked_whiten
from segrew.preferences import everyday_pairs
from segrew.run_directory import read_jsonl
from segrew.segmentation import segment_by_entropy, segment_by_ngram
from segrew.tiny_model import make_tiny_model
from segrew.token_statistics import token_statistics


@dataclass(frozen=True)
class Scale:
    """Sizes: of a 1.1 B Llama and batches that fill a GPU, or of the same code in seconds on a CPU."""

    layers: int = 22
    hidden: int = 2048
    heads: int = 32
    vocabulary: int = 32000
    rows: int = 1024
    width: int = 2048
    tokens: int = 8192
    copied: int = 2**28
    prompts: int = 16
    samples: int = 4
    prompt_tokens: int = 256
    answer_tokens: int = 512
    pairs: int = 96
    batch: int = 8
    rollouts: int = 64
    new_tokens: int = 256
    repeats: int = 7

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads // 8 or 1,
            max_position_embeddings=4096, pad_token_id=0, bos_token_id=None, eos_token_id=2,
        )  # fmt: skip


SMALL = Scale(
    layers=1, hidden=32, heads=2, vocabulary=1024, rows=4, width=32, tokens=64, copied=2**12, prompts=2, samples=2,
    prompt_tokens=8, answer_tokens=12, pairs=4, batch=2, rollouts=2, new_tokens=6, repeats=1,
)  # fmt: skip


def seconds(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time after two calls to warm up; on CUDA between events, so that launching does not count."""
    function()
    if device.type != "cuda":
        return core.seconds(function, repeats)
    function()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def copy_bandwidth(scale: Scale, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(scale.copied, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, scale.repeats)


def _bandwidth(used: int, took: float, scale: Scale, device: torch.device, **more: float) -> Outcome:
    copied = copy_bandwidth(scale, device)
    numbers = {"ms": took * 1e3, "GB/s": used / took / 1e9, "copy GB/s": copied / 1e9, "share": used / took / copied}
    says = f"{took * 1e3:.3f} ms, {numbers['GB/s']:.0f} GB/s of a copy's {numbers['copy GB/s']:.0f}"
    return Outcome(True, says, numbers | more)


def macro_bandwidth(scale: Scale, device: torch.device) -> Outcome:
    """Bytes that must move: rewards, values and unit ids in, advantages and returns out."""
    rewards, values = (torch.randn(scale.rows, scale.width, device=device) for _ in range(2))
    units = segment_by_ngram(torch.ones_like(rewards, dtype=torch.bool), 5)
    used = 4 * rewards.nbytes + units.ids.nbytes
    took = seconds(lambda: macro_advantages(rewards, values, units, gamma=1.0, lambda_=0.95), device, scale.repeats)
    return _bandwidth(used, took, scale, device)


def statistics_bandwidth(scale: Scale, device: torch.device) -> Outcome:
    """Bytes that must move beside the product: the logits, once out and once in."""
    hidden = torch.randn(scale.tokens, scale.hidden, device=device)
    weight = torch.randn(scale.vocabulary, scale.hidden, device=device) * scale.hidden**-0.5
    targets = torch.randint(scale.vocabulary, (scale.tokens,), device=device)
    chunk = min(scale.tokens, 1024)
    whole = seconds(lambda: token_statistics(hidden, weight, targets), device, scale.repeats)
    product = seconds(lambda: hidden[:chunk] @ weight.T, device, scale.repeats) * scale.tokens / chunk
    flops = 2 * scale.tokens * scale.vocabulary * scale.hidden
    used = 2 * scale.tokens * scale.vocabulary * 4
    outcome = _bandwidth(
        used, max(whole - product, 1e-9), scale, device, product_ms=product * 1e3, whole_ms=whole * 1e3,
        tflops=flops / whole / 1e12,
    )  # fmt: skip
    outcome.says = f"beside the product ({product * 1e3:.2f} of {whole * 1e3:.2f} ms): {outcome.says}"
    return outcome


def _rows(scale: Scale, vocabulary: int) -> Conversations:
    draw = torch.Generator().manual_seed(0)

    def text(most: int) -> list[int]:
        length = int(torch.randint(most // 4 + 1, most + 1, (), generator=draw))
        return torch.randint(3, vocabulary, (length,), generator=draw).tolist()

    prompts = [text(scale.prompt_tokens) for _ in range(scale.prompts)]
    responses = [text(scale.answer_tokens) for _ in range(scale.prompts * scale.samples)]
    repeated = [prompt for prompt in prompts for _ in range(scale.samples)]
    return Conversations(repeated, responses, torch.zeros(len(responses), dtype=torch.bool))


def _random_model(scale: Scale, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(scale.config()).to(dtype).eval()


def packed_beside_padded(scale: Scale, device: torch.device) -> Outcome:
    """The same states and gradients from flat rows with shared prompts as from padded ones, and how much sooner."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, rows = _random_model(scale, device, dtype), _rows(scale, scale.vocabulary)
    model.requires_grad_(False)
    probe = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    found: dict[str, list[Tensor]] = {}
    took: dict[str, float] = {}
    for layout in ("packed", "padded"):

        def learn(layout: Any = layout) -> Tensor:
            at = response_states(model, rows, layout=layout).at
            (gradient,) = torch.autograd.grad(at.float().square().sum(), probe)
            found[layout] = [at.detach(), gradient]
            return gradient

        def read(layout: Any = layout) -> None:
            with torch.no_grad():
                response_states(model, rows, layout=layout)

        took[layout] = seconds(read, device, min(scale.repeats, 3))
        took[f"{layout}, with gradient"] = seconds(learn, device, min(scale.repeats, 3))
    gaps = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found["packed"], found["padded"], strict=True)
    ]
    bound = 5e-2 if dtype == torch.bfloat16 else 1e-4
    faster = took["padded"] / took["packed"], took["padded, with gradient"] / took["packed, with gradient"]
    says = f"{faster[0]:.1f}x, with gradient {faster[1]:.1f}x; apart by {gaps[0]:.1e} and {gaps[1]:.1e} of the norm"
    return Outcome(max(gaps) < bound, says, {"seconds_of": took, "states_gap": gaps[0], "gradient_gap": gaps[1]})


def bf16_beside_float32(scale: Scale, device: torch.device) -> Outcome:
    """Log-probabilities and entropies of a float32 model under autocast to bf16."""
    narrow = Scale(**vars(scale) | {"layers": min(scale.layers, 4)})
    model, rows = _random_model(narrow, device, torch.float32), _rows(scale, scale.vocabulary)
    with torch.no_grad():
        exact = response_statistics(model, rows)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            rounded = response_statistics(model, rows)
    mask = rows.mask.to(device)
    gaps = [float((a - b)[mask].abs().mean()) for a, b in zip(rounded, exact, strict=True)]
    says = f"mean difference {gaps[0]:.4f} nats of log-probabilities, {gaps[1]:.4f} of entropies"
    return Outcome(max(gaps) < 0.05 and all(x.dtype == torch.float32 for x in rounded), says, {"nats": gaps})


def compiled_beside_eager(scale: Scale, device: torch.device) -> Outcome:
    """From entropies to losses as one graph."""
    mask = torch.ones(scale.rows, scale.width, dtype=torch.bool, device=device)
    entropy, rewards, values, logprobs = (torch.randn(4, scale.rows, scale.width, device=device)).unbind(0)

    def maths(entropy: Tensor, rewards: Tensor, values: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        units = segment_by_entropy(entropy, mask, threshold=0.5)
        unit_rewards = rewards.gather(1, units.ends).masked_fill(~units.unit_mask, 0.0)
        dense = spread_rewards(PHI.transform(unit_rewards, units.locations), units, how="even")
        advantages, returns = macro_advantages(dense, values, units, gamma=1.0, lambda_=0.95)
        loss, _ = policy_loss(logprobs, logprobs - 0.1, masked_whiten(advantages, mask), units)
        return loss, value_loss(values + 0.1, values, returns, mask, clip=0.2)[0]

    inputs = (entropy, rewards, values, logprobs)
    compiled = torch.compile(maths, fullgraph=True, backend="inductor" if device.type == "cuda" else "eager")
    gap = max(
        float((a - b).abs() / b.abs().clamp(min=1)) for a, b in zip(compiled(*inputs), maths(*inputs), strict=True)
    )
    took = [seconds(lambda f=f: f(*inputs), device, scale.repeats) for f in (compiled, maths)]
    says = f"one graph, {took[1] / took[0]:.1f}x eager; largest difference {gap:.1e}"
    return Outcome(gap < 2e-4, says, {"difference": gap, "compiled_ms": took[0] * 1e3, "eager_ms": took[1] * 1e3})


def write_random_model(scale: Scale, device: torch.device, path: Path) -> Path:
    """A directory with a random Llama and the tokenizer of the embedded pairs."""
    if not (path / "model.safetensors").exists():
        make_tiny_model(path, steps=0)
        _random_model(scale, device, torch.bfloat16).save_pretrained(path, max_shard_size="50GB")
    return path


def reward_model_step(scale: Scale, device: torch.device, work: Path) -> Outcome:
    """Full fine-tuning through `train_reward_model`: once to warm up and compile, and once to measure."""
    model = write_random_model(scale, device, work / "model")
    config = RewardModelConfig(
        model_name_or_path=str(model), quantile=0.8, tune="full", max_pairs=scale.pairs, dataset_test_split=None,
        overwrite_output_dir=True,
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps = max(scale.pairs // scale.batch // 2, 1)
    for count in (2, steps)[device.type != "cuda" :]:
        args = RewardTrainingArguments(
            output_dir=str(work / "reward_model"), per_device_train_batch_size=scale.batch, max_steps=count,
            learning_rate=1e-6, logging_steps=1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        train_reward_model(config, args, Console(quiet=True))
    lines = read_jsonl(work / "reward_model" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    rate = next(line["train_samples_per_second"] for line in lines if "train_samples_per_second" in line)
    tokens = rate * _tokens_of_a_pair(model, scale)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    says = f"{rate:.1f} pairs/s, about {tokens:.0f} tokens/s" + (f", peak {peak:.1f} GB" if peak else "")
    numbers = {"pairs_per_second": rate, "tokens_per_second": tokens, "peak_gb": peak, "losses": losses}
    return Outcome(bool(losses) and all(0 < loss < 10 for loss in losses), says, numbers)


def _tokens_of_a_pair(model: Path, scale: Scale) -> float:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = []
    for pair in everyday_pairs("train")[: scale.pairs]:
        texts += [message["content"] for message in pair.prompt] + [pair.chosen, pair.rejected]
    return sum(map(len, tokenizer(texts)["input_ids"])) / scale.pairs


def ppo_step(scale: Scale, device: torch.device, work: Path) -> Outcome:
    """Full fine-tuning of policy and critic through `train_policy`; the last of three steps counts."""
    model = write_random_model(scale, device, work / "model")
    reward = work / "reward_model"
    if not (reward / "segrew.json").exists():
        raise ValueError("no reward model to pay for the answers: the reward-model step failed or was left out.")
    config = PPOConfig(
        model_name_or_path=str(model), reward_model_path=str(reward), normalizer="none", action_rule="ngram",
        rollout_batch_size=scale.rollouts, local_rollout_forward_batch_size=scale.rollouts,
        max_new_tokens=scale.new_tokens, per_device_train_batch_size=scale.batch,
        total_steps=3 if scale.layers > 1 else 1, save_steps=0, output_dir=str(work / "ppo"), overwrite_output_dir=True,
    )  # fmt: skip
    line = read_jsonl(train_policy(config) / "metrics.jsonl")[-1]
    phases = {name: value for name, value in line.items() if name.startswith("time/")}
    shown = ", ".join(f"{name.removeprefix('time/')} {value:.2f} s" for name, value in phases.items())
    peak = line["memory/peak_mb"] / 1e3
    says = f"{line['tokens_per_second']:.0f} tokens/s, peak {peak:.1f} GB; {shown}"
    numbers = {"tokens_per_second": line["tokens_per_second"], "peak_gb": peak, "phases": phases}
    finite = all(abs(line[name]) < 1e6 for name in ("policy/loss", "value/loss", "kl/k1"))
    return Outcome(finite and abs(line["policy/approx_kl"]) < 1, says, json.loads(json.dumps(numbers)))


def speed_checks(scale: Scale, device: torch.device, work: Path) -> dict[str, Callable[[], Outcome]]:
    """Bandwidths, forms beside each other, whole steps; the PPO step is paid by the reward model of the step before."""
    return {
        "macro advantages, bandwidth": partial(macro_bandwidth, scale, device),
        "token statistics, bandwidth": partial(statistics_bandwidth, scale, device),
        "packed rows beside padded": partial(packed_beside_padded, scale, device),
        "bf16 beside float32": partial(bf16_beside_float32, scale, device),
        "compiled beside eager": partial(compiled_beside_eager, scale, device),
        "reward-model step": partial(reward_model_step, scale, device, work),
        "PPO step": partial(ppo_step, scale, device, work),
    }
