"""A short language with a planted task: 16 letters, answers of 48, and a key token for each half of an answer.

A unit of four letters is worth 1/12 if it holds its key: `a` in the first half of an answer, `b` in the second. So the
optimum is 1 and known; the reward is the same total whether it is paid unit by unit or at the end.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnop"
UNIT, LENGTH = 4, 48


def values(units: list[str]) -> list[float]:
    """What each unit of an answer is worth, as a share of the best answer."""
    count = LENGTH // UNIT
    keys = "a" * (count // 2) + "b" * (count // 2)
    return [float(key in unit) / count for unit, key in zip(units, keys, strict=False)]


def dense(prompts: list, completions: list[str], segments: list[list[str]]) -> list[list[float]]:
    """Reward function for `segrew ppo` with `--reward_rule ngram --n 4`: one value a unit."""
    return [values(units) for units in segments]


def terminal(prompts: list, completions: list[str]) -> list[float]:
    """Reward function for `segrew ppo`: the same total, at the answer's end."""
    return [sum(values([text[i : i + UNIT] for i in range(0, len(text), UNIT)])) for text in completions]


def write_policy(path: Path, seed: int = 0) -> Path:
    """Write a Llama of some ten thousand random weights that writes one letter a token."""
    symbols = ["<pad>", "<stop>", *LETTERS]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<stop>").save_pretrained(path)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path
