"""Language models: loading and identity."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from segrew.cpu import fit_to_cpu
from segrew.embedded_model import resolve_model
from segrew.run_directory import CARD_FILE, read_json


def best_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def best_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the processor computes in it, float32 elsewhere."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def adapter_base(name_or_path: str) -> str | None:
    """Return the model that a LoRA adapter directory belongs to; None if it is no such directory."""
    config = Path(name_or_path) / "adapter_config.json"
    return read_json(config)["base_model_name_or_path"] if config.is_file() else None


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from a directory or the hub; an adapter without one takes its base model's.

    Raises:
        ValueError: there is none under that name.
    """
    base = adapter_base(name_or_path)
    if base is not None and not (Path(name_or_path) / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name_or_path), trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"no tokenizer at '{name_or_path}': {str(error).splitlines()[0]}") from None
    except Exception as error:  # of a damaged file, tokenizers knows no narrower one
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"no tokenizer can be read from '{name_or_path}': {reason[:300]}") from None


def _refuse_reward_model(name_or_path: str) -> None:
    card = Path(name_or_path) / CARD_FILE
    if card.is_file():
        base = read_json(card).get("base_model", "the model that it was made of")
        raise ValueError(
            f"'{name_or_path}' is a reward model ({CARD_FILE}): its weights were trained to score answers, not to "
            f"predict tokens. Name a language model here, such as {base}, and pass the directory as the reward model."
        )


def load_causal_lm(
    name_or_path: str, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """Load a causal language model in evaluation mode, without any pattern of dropout left on.

    A directory with a LoRA adapter gives its base model with the adapter merged.

    Args:
        dtype: of the weights; default float32 on CPU without bfloat16 units, see `best_dtype`.

    Raises:
        ValueError: there is no model under that name, it is a reward model, or its trunk or head is none that is known.
    """
    device = device or best_device()
    _refuse_reward_model(name_or_path)
    base = adapter_base(name_or_path)
    if base is not None:
        from peft import PeftModel

        start: Any = load_causal_lm(base, dtype=torch.float32, device=device)
        merged: Any = PeftModel.from_pretrained(start, name_or_path).merge_and_unload()
        return merged.to(dtype or best_dtype(device)).eval()
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            resolve_model(name_or_path),
            trust_remote_code=False,
            dtype=dtype or best_dtype(device),
            output_loading_info=True,
        )
    except (OSError, KeyError) as error:
        raise ValueError(f"no language model at '{name_or_path}': {str(error).splitlines()[0]}") from None
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(
            f"'{name_or_path}' is no whole language model: {', '.join(sorted(info['missing_keys']))} missing from the "
            "checkpoint, and random stand-ins would make its entropies noise."
        )
    if trunk_of(model) is model:
        raise ValueError(
            f"'{name_or_path}' is a {type(model).__name__}, whose transformer and head cannot be told apart; take the "
            "text-only model of its family."
        )
    from segrew.conversations import check_head  # which is built on this module

    fit_to_cpu(model)
    model.to(device).eval()
    check_head(model)
    return model


def unused_pad_id(tokenizer: Any, stop_ids: tuple[int, ...]) -> int:
    """Choose a padding token that no stop token equals, for readers that find a row's end by it.

    Raises:
        ValueError: every special token ends a response.
    """
    names = ["<|endoftext|>", "<pad>", "[PAD]", "<unk>"]
    candidates = [tokenizer.pad_token_id, *tokenizer.convert_tokens_to_ids(names), *tokenizer.all_special_ids]
    for candidate in candidates:
        if candidate is not None and candidate not in stop_ids:
            return candidate
    raise ValueError("every special token of the tokenizer is a stop token; add one to pad with ('<pad>').")


def plain_model(model: Any) -> Any:
    """Return the transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the transformer below the head, LoRA layers included."""
    return plain_model(model).base_model


def context_length(model: nn.Module) -> int | None:
    """Return how many tokens the model has positions for; None where nothing bounds them."""
    config: Any = trunk_of(model).config.get_text_config()  # type: ignore[union-attr, operator]
    return getattr(config, "max_position_embeddings", None)


def require_context(model: nn.Module, max_length: int, name: str) -> None:
    """Refuse to read rows that are longer than a model's context.

    Raises:
        ValueError: naming the flag and the limit.
    """
    limit = context_length(model)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"--max_length {max_length}: the context of {name} has {limit} tokens, and past it a model's numbers mean "
            f"nothing; set --max_length {limit} or less."
        )


def model_fingerprint(model: nn.Module) -> str:
    """Short hash of every weight of a language model, in bfloat16: equal after loading in float32 or bfloat16."""
    weights = dict(trunk_of(model).named_parameters())
    lm_head = plain_model(model).get_output_embeddings()
    if lm_head is not None and all(lm_head.weight is not weight for weight in weights.values()):
        weights["lm_head"] = lm_head.weight
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().bfloat16().contiguous().view(torch.int16).cpu().numpy().data)
    return digest.hexdigest()[:16]
