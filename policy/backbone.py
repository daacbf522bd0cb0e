"""One set of weights under every role: what is frozen is held once, what learns is each role's own.

With LoRA the policy, its frozen start, the critic and the reward models are views of one base: modules of their own
over the same weights, each with its own adapter. Switching adapters on one module would hold no less, and would show a
recomputed layer the adapter of another role.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policy.ppo_config import PPOConfig
from segrew.cpu import fit_to_cpu
from segrew.language_models import adapter_base, load_causal_lm, model_fingerprint, plain_model, trunk_of
from segrew.run_directory import read_json

ADAPTER = "lora_"  # in the name of each of an adapter's weights


def view_of(model: nn.Module) -> Any:
    """Copy a model's modules and adapter, over the same weights."""
    held = {id(p): p for name, p in model.named_parameters() if ADAPTER not in name}
    return copy.deepcopy(model, held)


def learning(view: nn.Module, config: PPOConfig) -> nn.Module:
    """Let a view's adapter learn, or a new one where it has none, and nothing else."""
    if any(ADAPTER in name for name, _ in view.named_parameters()):
        for name, weight in view.named_parameters():
            weight.requires_grad_(ADAPTER in name)
        return view
    from peft import LoraConfig, get_peft_model

    targets: Any = config.lora_target_modules
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    adapted: nn.Module = get_peft_model(view, lora)  # type: ignore[arg-type]
    fit_to_cpu(adapted)
    return adapted


def with_adapter(base: nn.Module, directory: str | Path, *, learns: bool) -> nn.Module:
    """A view of the base under the adapter that a directory holds."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(view_of(base), directory, is_trainable=learns)
    fit_to_cpu(adapted)
    return adapted.eval()


def load_start(config: PPOConfig, device: torch.device) -> tuple[nn.Module, nn.Module, str]:
    """Load what the policy starts from, frozen.

    Returns:
        The base model, the start, and the start's fingerprint with its adapter merged. Base and start are one, unless
        LoRA goes on training an adapter: then the start is a view of its base.
    """
    name, options = config.model_name_or_path, {"dtype": torch.float32, "device": device}
    source = adapter_base(name) if keeps_adapter(config) else None
    merged = load_causal_lm(name, **options).requires_grad_(False)  # type: ignore[arg-type]
    fingerprint = model_fingerprint(merged)
    if source is None:
        return merged, merged, fingerprint
    del merged
    base = load_causal_lm(source, **options).requires_grad_(False)  # type: ignore[arg-type]
    return base, with_adapter(base, name, learns=False), fingerprint


def keeps_adapter(config: PPOConfig) -> bool:
    """Whether the start is a LoRA adapter below the embeddings and the head, and nothing else, that is trained on."""
    name = config.model_name_or_path
    if not config.use_peft or adapter_base(name) is None:
        return False
    adapter = read_json(Path(name) / "adapter_config.json")
    targets = adapter["target_modules"]
    plain = adapter["peft_type"] == "LORA" and not adapter.get("modules_to_save") and not isinstance(targets, str)
    return plain and not {"lm_head", "embed_tokens", "embed_in", "embed_out", "wte"} & set(targets)


def hold_once(model: nn.Module, base: nn.Module) -> None:
    """Let a frozen model hold the weights that it has in common with `base` as the same tensors."""
    held = {_plain(name): weight for name, weight in trunk_of(base).named_parameters()}
    trunk = trunk_of(model)
    for name, weight in list(trunk.named_parameters()):
        twin = held.get(_plain(name))
        if twin is not None and twin.dtype == weight.dtype and torch.equal(twin, weight):
            path, _, leaf = name.rpartition(".")
            setattr(trunk.get_submodule(path), leaf, twin)


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def trunk_to_learn(source: nn.Module, config: PPOConfig) -> nn.Module:
    """A trunk for the critic that starts as another model's: a view with an adapter, or a copy of all weights."""
    whole = all(weight.dtype == torch.float32 for weight in source.parameters())
    if config.use_peft and whole:
        return learning(trunk_of(view_of(source)), config)
    merged: Any = copy.deepcopy(source)
    if hasattr(merged, "merge_and_unload"):
        merged = merged.merge_and_unload()
    trunk = trunk_of(plain_model(merged)).float()
    return learning(trunk, config) if config.use_peft else trunk.requires_grad_(True)
