"""What a PPO run holds in memory: estimated before anything is loaded, and counted by role afterwards."""

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from policy.ppo_config import PPOConfig
from segrew.embedded_model import resolve_model
from segrew.language_models import adapter_base

FLOAT32 = 4
# Bytes kept for the backward pass per token, layer and hidden unit: 17 activations of 4 bytes, or the layer's input.
ACTIVATIONS, CHECKPOINTED_ACTIVATIONS = 17 * FLOAT32, FLOAT32
TAKES_LESS = (  # what follows "lower"
    "--per_device_train_batch_size or --max_prompt_length, or take --use_peft true or --gradient_checkpointing true."
)


def estimate_memory(config: PPOConfig) -> dict[str, int]:
    """Bytes by role: weights × dtype, gradients, AdamW's two moments, roughly the activations, the KV cache."""
    try:
        name = adapter_base(config.model_name_or_path) or config.model_name_or_path
        model_config: Any = AutoConfig.from_pretrained(resolve_model(name), trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"no language model at '{config.model_name_or_path}': {str(error).splitlines()[0]}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    weights = sum(p.numel() for p in model.parameters())
    trained = _adapter_size(model, config.lora_r) if config.use_peft else weights
    critics = int(config.advantage_estimator == "gae")
    own_trunk = critics and not (config.use_peft and config.critic_init == "sft")
    copies = {"policy": weights * FLOAT32}
    if critics:
        copies["critic"] = own_trunk * weights * FLOAT32
    rewarding = (config.reward_model_path, *config.extra_reward_models, *config.eval_reward_models)
    if not config.use_peft:
        copies["reference"] = weights * FLOAT32
    text = model_config.get_text_config()
    tokens = config.max_prompt_length + config.max_new_tokens
    per_token = text.num_hidden_layers * text.hidden_size
    per_activation = CHECKPOINTED_ACTIVATIONS if config.gradient_checkpointing else ACTIVATIONS
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache_width = heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    rows = min(config.local_rollout_forward_batch_size, config.rollout_batch_size)
    return copies | {
        "reward models": sum(
            file.stat().st_size for path in filter(None, rewarding) for file in Path(path).glob("*.safetensors")
        ),
        "gradients and AdamW": (1 + critics) * trained * 3 * FLOAT32,
        "activations, at most": config.per_device_train_batch_size * tokens * per_token * per_activation,
        "KV cache, at most": 2 * rows * tokens * text.num_hidden_layers * cache_width * FLOAT32,
    }


def _adapter_size(model: torch.nn.Module, rank: int) -> int:
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def available_memory() -> int:
    """Bytes of the accelerator, or of this machine where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that are free on the accelerator, or on this machine where there is none."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available


def count_by_role(models: dict[str, torch.nn.Module]) -> list[dict[str, str | int]]:
    """Weights of each role: parameters, those that train, those held by a role before it, and bytes of the others."""
    held: set[int] = set()
    rows: list[dict[str, str | int]] = []
    for role, model in models.items():
        weights = list(model.parameters())
        own = [weight for weight in weights if id(weight) not in held]
        held.update(map(id, own))
        parameters = sum(weight.numel() for weight in weights)
        rows.append(
            {
                "role": role,
                "parameters": parameters,
                "trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
                "shared": parameters - sum(weight.numel() for weight in own),
                "bytes": sum(weight.numel() * weight.element_size() for weight in own),
            }
        )
    return rows


def print_roles(rows: list[dict[str, str | int]], console: Console) -> None:
    """Show what each role holds."""
    table = Table("role", box=None)
    for name in ("parameters", "trainable", "shared", "GB of its own"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (f"{row[name]:,}" for name in ("parameters", "trainable", "shared"))
        table.add_row(str(row["role"]), *counts, f"{int(row['bytes']) / 1e9:.3f}")
    table.add_row("together", "", "", "", f"{sum(int(row['bytes']) for row in rows) / 1e9:.3f}")
    console.print(table)


def print_memory(estimate: dict[str, int], console: Console) -> None:
    """Show the estimate, with a warning where it is more than there is."""
    table = Table("memory, estimated", "GB", box=None)
    for role, size in estimate.items():
        table.add_row(role, f"{size / 1e9:.2f}")
    total, there = sum(estimate.values()), available_memory()
    table.add_row("together", f"{total / 1e9:.2f} of {there / 1e9:.1f}")
    console.print(table)
    if total > there:
        console.print(f"[yellow]More than this machine has:[/] lower {TAKES_LESS}")
