"""Tiny models of many families, their weights random."""

from collections.abc import Callable

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, a sliding layer": ("Qwen3", {"head_dim": 8, "use_sliding_window": True} | KINDS),
    "mistral": ("Mistral", {}),
    "mistral, a short window": ("Mistral", {"sliding_window": 4}),
    "phi3": ("Phi3", {}),
    "phi3, a short window": ("Phi3", {"sliding_window": 3}),
    "gemma2": ("Gemma2", GEMMA | KINDS | {"attn_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma3, a short window": ("Gemma3Text", GEMMA | KINDS),
    "gpt2": (
        "GPT2",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    # Their windows are in their masks alone, or they have sinks: rows longer than the window are padded.
    "phimoe, a short window": ("Phimoe", {"sliding_window": 4, "num_local_experts": 2}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1} | KINDS),
}


# FlexAttention's kernels take heads of at least 16 numbers.
WIDER = {"hidden_size": 64, "head_dim": 16, "n_embd": 64, "query_pre_attn_scalar": 16}


def build(name: str, *, wider: bool = False) -> torch.nn.Module:
    """A causal model in evaluation mode."""
    family, changes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes | (WIDER if wider else {}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # past the initial scale, where all architectures agree on next to nothing
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


@pytest.fixture(scope="session")
def build_family() -> Callable:
    return build


@pytest.fixture(scope="session")
def small_sizes() -> dict:
    return SIZES
