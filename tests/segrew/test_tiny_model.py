"""The model made on the spot: small, whole, repeatable, and able to learn."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint
from segrew.preferences import everyday_pairs
from segrew.tiny_model import make_tiny_model


def test_it_is_an_ordinary_model_of_under_a_million_weights(tiny_dir):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)
    assert sum(weight.numel() for weight in model.parameters()) < 1_000_000
    assert len(tokenizer) == model.config.vocab_size and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape[1] <= 5


def test_its_tokenizer_is_lossless_and_stops_at_the_template_s_turn_end(tiny_dir):
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(tiny_dir)))
    assert chat.tokenizer.convert_ids_to_tokens(chat.stop_id) == "<|im_end|>"
    for text in ("Tabs\tand\nlines", "ünï 🙂 e\u0301", everyday_pairs("test")[0].chosen):
        assert chat.decode(chat.response_ids(text)) == text
    prompt = chat.prompt_ids([{"role": "user", "content": "hi"}])
    assert chat.tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def loss(path) -> float:
    model = load_causal_lm(str(path), dtype=torch.float32)
    text = " ".join(pair.chosen for pair in everyday_pairs("test")[:4])
    ids = torch.tensor([load_tokenizer(str(path))(text)["input_ids"][:200]])
    return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.slow
def test_same_seed_same_model_and_training_teaches_it(tmp_path):
    none, few, again, other = (
        make_tiny_model(tmp_path / name, steps=steps, seed=seed)
        for name, steps, seed in (("a", 0, 0), ("b", 5, 0), ("c", 5, 0), ("d", 5, 1))
    )
    prints = [model_fingerprint(load_causal_lm(str(path))) for path in (none, few, again, other)]
    assert prints[1] == prints[2] and len(set(prints)) == 3
    assert loss(few) < loss(none) - 0.1
