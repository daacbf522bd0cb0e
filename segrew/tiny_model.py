"""A language model under one million parameters, made on the spot: the same code paths in seconds."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from segrew.chat_templates import NAMED_TEMPLATES
from segrew.preferences import everyday_pairs

_SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]


def _tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = NAMED_TEMPLATES["chatml"]
    return fast


def make_tiny_model(path: str | Path, *, steps: int = 200, vocabulary: int = 1024, seed: int = 0) -> Path:
    """Write a small Llama and its tokenizer, taught a little English from the embedded pairs.

    Args:
        steps: of language-model training (16 windows of 64 tokens each); 0 leaves random weights.
    """
    torch.manual_seed(seed)
    pairs = everyday_pairs("train")
    tokenizer = _tokenizer([text for pair in pairs for text in (pair.chosen, pair.rejected)], vocabulary)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    conversations = [[*pair.prompt, {"role": "assistant", "content": pair.chosen}] for pair in pairs]
    text = "".join(str(tokenizer.apply_chat_template(messages, tokenize=False)) for messages in conversations)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(seed)
    for _ in range(steps):
        starts = [draw.randrange(len(ids) - 64) for _ in range(16)]
        batch = torch.stack([ids[start : start + 64] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)
