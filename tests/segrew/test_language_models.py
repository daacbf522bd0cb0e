"""Hidden states around response tokens: the same from every layout, for every architecture, in every company."""

import pytest
import torch
import transformers
from torch.nn.functional import log_softmax
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from segrew.language_models import (
    Conversations,
    _packs,
    load_causal_lm,
    load_tokenizer,
    micro_batches,
    model_fingerprint,
    response_states,
    response_statistics,
    trunk_of,
    unused_pad_id,
)

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
PACKED = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "query_pre_attn_scalar": 8}),
}
PADDED = {
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "mistral with a short window": ("Mistral", {"sliding_window": 4}),
    "gemma3 with a short window": ("Gemma3Text", {"head_dim": 8, "sliding_window": 4}),
}


def build(name: str) -> torch.nn.Module:
    family, changes = {**PACKED, **PADDED}[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # past the initial scale, where all architectures agree on next to nothing
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10], [5, 6, 7], [8, 9]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 17, 2], [18], [19, 20, 2], [], [21, 2]]
ROWS = Conversations(PROMPTS, RESPONSES, torch.tensor([True, True, False, True, False, True]))
APART = Conversations(
    [[5, 6, 7], [8, 9], [10]], [[11, 12, 2], [13, 14, 15, 16], [2]], torch.tensor([True, False, True])
)


def one_by_one(model, conversations: Conversations):
    """The same states from each row alone, without padding: the definition."""
    width = max(conversations.lengths)
    before, at = [], []
    for prompt, response in zip(conversations.prompts, conversations.responses, strict=True):
        states = trunk_of(model)(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
        fill = states.new_zeros(width - len(response), states.shape[-1])
        n = len(prompt)
        before.append(torch.cat([states[n - 1 : n - 1 + len(response)], fill]))
        at.append(torch.cat([states[n : n + len(response)], fill]))
    return torch.stack(before), torch.stack(at)


@pytest.mark.parametrize("rows", [ROWS, APART], ids=["shared prompts", "prompts apart"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_and_padded_states_and_gradients_equal_row_by_row(name, rows):
    model = build(name)
    assert _packs(trunk_of(model), 12)
    torch.manual_seed(1)
    weights = torch.randn(2, len(rows), max(rows.lengths), 16)

    def outcome(before, at):
        model.zero_grad()
        (before * weights[0] + at * weights[1]).sum().backward()
        return (
            before.detach(),
            at.detach(),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )

    expected = outcome(*one_by_one(model, rows))
    assert len(expected[2]) > 10 and expected[1].abs().max() > 0.1
    for layout in ("packed", "padded"):
        states = response_states(model, rows, layout=layout)
        before, at, gradients = outcome(states.before, states.at)
        torch.testing.assert_close(before, expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(at, expected[1], atol=1e-5, rtol=1e-5)
        for parameter, gradient in expected[2].items():
            torch.testing.assert_close(gradients[parameter], gradient, atol=1e-4, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", PADDED)
def test_models_that_cannot_be_packed_are_padded_and_right(name):
    model = build(name)
    assert not _packs(trunk_of(model), 12)
    states = response_states(model, ROWS)
    for found, expected in zip((states.before, states.at), one_by_one(model, ROWS), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["GptOss", "Lfm2", "Qwen3Next"])
def test_sinks_and_layers_that_carry_a_state_are_never_packed(family):
    """What attention by blocks would leave out (sinks) or let run from row to row (convolutions, linear attention)."""
    kinds = {"Lfm2": ["conv", "full_attention"], "Qwen3Next": ["linear_attention", "full_attention"]}
    small = {"head_dim": 8, "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "sliding_window": 64}
    changes = small | ({"layer_types": kinds[family]} if family in kinds else {})
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**SIZES | changes))
    assert not _packs(model, 12)


def test_activation_checkpointing_in_training_is_padded():
    model = build("llama")
    model.gradient_checkpointing_enable()
    assert _packs(trunk_of(model), 12) and not _packs(trunk_of(model.train()), 12)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_states_do_not_depend_on_company_order_or_what_comes_after(layout):
    model = build("llama")
    whole = response_states(model, ROWS, layout=layout)
    for row in range(len(ROWS)):
        if not ROWS.responses[row]:
            continue
        alone = response_states(model, ROWS.select([row]), layout=layout)
        width = ROWS.lengths[row]
        torch.testing.assert_close(whole.at[row, :width], alone.at[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(whole.before[row, :width], alone.before[0], atol=1e-5, rtol=0)
    order = [3, 1, 5, 0, 4, 2]
    torch.testing.assert_close(
        response_states(model, ROWS.select(order), layout=layout).at, whole.at[order], atol=1e-5, rtol=0
    )
    changed = Conversations(PROMPTS, [r[:2] + [33] * len(r[2:]) for r in RESPONSES], ROWS.ended)
    after = response_states(model, changed, layout=layout)
    torch.testing.assert_close(after.at[:, :2], whole.at[:, :2], atol=1e-5, rtol=0)


def test_padding_is_zero_and_a_batch_of_empty_responses_has_no_columns():
    model = build("llama")
    states = response_states(model, ROWS)
    assert states.at[~ROWS.mask].abs().sum() == 0 == states.before[~ROWS.mask].abs().sum()
    assert response_states(model, ROWS.select([4])).at.shape == (1, 0, 16)


def test_b02_an_empty_prompt_names_its_row():
    rows = Conversations([[1], []], [[2], [3]], torch.tensor([True, True]))
    with pytest.raises(ValueError, match="row 1: an empty prompt"):
        response_states(build("llama"), rows)


def test_the_model_s_own_attention_is_back_after_a_packed_pass():
    model = build("llama")
    response_states(model, ROWS, layout="packed")
    assert trunk_of(model).config._attn_implementation == "sdpa"
    ids = torch.tensor([[5, 6, 7, 11]])
    torch.testing.assert_close(model(ids).logits[0, 2:].argmax(-1).shape, torch.Size([2]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3"])
def test_statistics_equal_the_model_s_own_logits(name, temperature):
    """Log-probability and entropy of column j are those of the distribution that produced token j."""
    model = build(name)
    logprobs, entropy = response_statistics(model, ROWS, temperature=temperature)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0].double()
        for j, token in enumerate(response):
            produced = logits[len(prompt) + j - 1]
            own = log_softmax(produced, -1)
            assert logprobs[row, j].item() == pytest.approx(
                log_softmax(produced / temperature, -1)[token].item(), abs=1e-4
            )
            assert entropy[row, j].item() == pytest.approx(-(own.exp() * own).sum().item(), abs=1e-4)
    assert logprobs[~ROWS.mask].abs().sum() == 0 == entropy[~ROWS.mask].abs().sum()


def test_statistics_of_logits_scaled_by_the_config():
    config = transformers.CohereConfig(**SIZES | {"logit_scale": 0.25})
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    logprobs, _ = response_statistics(model, APART)
    expected = log_softmax(model(torch.tensor([[10, 2]])).logits[0, 0], -1)[2]
    torch.testing.assert_close(logprobs[2, 0], expected, atol=1e-5, rtol=1e-5)


def test_conversations_know_their_shape():
    assert ROWS.lengths == [3, 6, 1, 3, 0, 2] and len(ROWS) == 6
    assert ROWS.response_ids[2].tolist() == [18, 0, 0, 0, 0, 0]
    assert ROWS.mask.sum(1).tolist() == ROWS.lengths and ROWS.mask[:, 0].tolist() == [True] * 4 + [False, True]
    part = ROWS.select([5, 0])
    assert part.responses == [[21, 2], [11, 12, 2]] and part.prompts == [[8, 9], [5, 6, 7]]
    assert part.ended.tolist() == [True, True]
    assert len(ROWS.select([])) == 0


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_micro_batches_hold_each_row_once_longest_first_and_prompts_together(size):
    batches = list(micro_batches(ROWS, size))
    order = [row for batch in batches for row in batch]
    assert sorted(order) == list(range(6)) and all(len(batch) <= size for batch in batches)
    sizes = [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert sizes[order[0]] == max(sizes)
    places = {}
    for place, row in enumerate(order):
        places.setdefault(tuple(PROMPTS[row]), []).append(place)
    assert all(max(p) - min(p) == len(p) - 1 for p in places.values())


def test_the_fingerprint_survives_loading_in_bfloat16_and_tells_weights_apart(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    own = model_fingerprint(load_causal_lm(str(tmp_path), dtype=torch.float32))
    assert own == model_fingerprint(load_causal_lm(str(tmp_path), dtype=torch.bfloat16)) == model_fingerprint(model)
    for name, weight in model.named_parameters():
        for place in (0, -1):
            before = weight.detach().flatten()[place].clone()
            with torch.no_grad():
                weight.view(-1)[place] += 0.5
            assert model_fingerprint(model) != own, (name, place)
            with torch.no_grad():
                weight.view(-1)[place] = before
    assert model_fingerprint(model) == own


def test_a_classifier_has_the_fingerprint_of_its_trunk_alone(build_scorer_config):
    config = build_scorer_config()
    first, second = LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)
    second.model.load_state_dict(first.model.state_dict())
    assert model_fingerprint(first) == model_fingerprint(second)


def test_a_checkpoint_without_output_weights_is_no_segmenter(tmp_path, build_scorer_config):
    LlamaForSequenceClassification(build_scorer_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no whole language model: lm_head\.weight missing"):
        load_causal_lm(str(tmp_path))


def test_nothing_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no language model at .*none"):
        load_causal_lm(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"no tokenizer at .*none"):
        load_tokenizer(str(tmp_path / "none"))


def test_the_pad_token_is_no_stop_token(build_byte_tokenizer):
    tokenizer = build_byte_tokenizer()
    assert unused_pad_id(tokenizer, (2,)) == 0
    assert unused_pad_id(build_byte_tokenizer(pad="</s>"), (2,)) == 0  # <pad> is in the vocabulary all the same
    assert unused_pad_id(tokenizer, (0, 2)) == 1
    with pytest.raises(ValueError, match="every special token"):
        unused_pad_id(tokenizer, (0, 1, 2))
