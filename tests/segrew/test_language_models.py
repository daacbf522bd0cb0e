"""Hidden states around response tokens: the same from every layout, for every architecture, in every company."""

import pytest
import torch
import transformers
from torch.nn.functional import log_softmax
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

from reward_models.checkpoints import config_of, load_classifier
from segrew.conversations import Conversations, micro_batches, response_states, response_statistics, runs_padded
from segrew.language_models import (
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    require_context,
    trunk_of,
    unused_pad_id,
)
from segrew.packing import lay_out
from segrew.run_directory import write_json

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10], [5, 6, 7], [8, 9]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 17, 2], [18], [19, 20, 2], [], [21, 2]]
ROWS = Conversations(PROMPTS, RESPONSES, torch.tensor([True, True, False, True, False, True]))
APART = Conversations(
    [[5, 6, 7], [8, 9], [10]], [[11, 12, 2], [13, 14, 15, 16], [2]], torch.tensor([True, False, True])
)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_states_do_not_depend_on_company_order_or_what_comes_after(build_family, layout):
    model = build_family("llama")
    states = response_states(model, ROWS, layout=layout)
    before, at = states.spread(states.before), states.spread(states.at)
    for row in range(len(ROWS)):
        if not ROWS.responses[row]:
            continue
        alone = response_states(model, ROWS.select([row]), layout=layout)
        width = ROWS.lengths[row]
        torch.testing.assert_close(at[row, :width], alone.at, atol=1e-5, rtol=0)
        torch.testing.assert_close(before[row, :width], alone.before, atol=1e-5, rtol=0)
    order = [3, 1, 5, 0, 4, 2]
    other = response_states(model, ROWS.select(order), layout=layout)
    torch.testing.assert_close(other.spread(other.at), at[order], atol=1e-5, rtol=0)
    changed = Conversations(PROMPTS, [r[:2] + [33] * len(r[2:]) for r in RESPONSES], ROWS.ended)
    after = response_states(model, changed, layout=layout)
    torch.testing.assert_close(after.spread(after.at)[:, :2], at[:, :2], atol=1e-5, rtol=0)


def test_padding_is_zero_and_a_batch_of_empty_responses_has_no_columns(build_family):
    model = build_family("llama")
    states = response_states(model, ROWS)
    assert states.spread(states.at).shape == (*ROWS.mask.shape, 16)
    assert states.spread(states.at)[~ROWS.mask].abs().sum() == 0
    empty = response_states(model, ROWS.select([4]))
    assert empty.at.shape == (0, 16) and empty.spread(empty.at).shape == (1, 0, 16)


def test_b02_an_empty_prompt_names_its_row(build_family):
    rows = Conversations([[1], []], [[2], [3]], torch.tensor([True, True]))
    with pytest.raises(ValueError, match="row 1: an empty prompt"):
        response_states(build_family("llama"), rows)


def test_the_model_s_own_attention_is_back_after_a_packed_pass(build_family):
    model = build_family("llama")
    response_states(model, ROWS, layout="packed")
    assert trunk_of(model).config._attn_implementation == "sdpa"
    ids = torch.tensor([[5, 6, 7, 11]])
    torch.testing.assert_close(model(ids).logits[0, 2:].argmax(-1).shape, torch.Size([2]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3"])
def test_statistics_equal_the_model_s_own_logits(build_family, name, temperature):
    """Log-probability and entropy of column j are those of the distribution that produced token j."""
    model = build_family(name)
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


SCALED = {
    "Cohere": {"logit_scale": 0.25},
    "FalconH1": {
        "lm_head_multiplier": 0.25,
        "mamba_d_ssm": 16,
        "mamba_n_heads": 2,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "Granite": {"logits_scaling": 4.0},
    "HyperCLOVAX": {"logits_scaling": 0.25, "head_dim": 4},
    "RecurrentGemma": {"logits_soft_cap": 0.5, "num_hidden_layers": 3, "lru_width": 16},
}


@pytest.mark.filterwarnings("ignore:.*padded rows")
@pytest.mark.parametrize("name", SCALED)
def test_statistics_of_logits_scaled_or_capped_by_the_config(small_sizes, name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**small_sizes | SCALED[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)  # so that scale and cap show
        logprobs, _ = response_statistics(model, APART)
        expected = log_softmax(model(torch.tensor([[10, 2]])).logits[0, 0], -1)[2]
    torch.testing.assert_close(logprobs[2, 0], expected, atol=1e-4, rtol=1e-4)


def test_conversations_know_their_shape():
    assert ROWS.lengths == [3, 6, 1, 3, 0, 2] and len(ROWS) == 6
    assert ROWS.response_ids[2].tolist() == [18, 0, 0, 0, 0, 0]
    assert ROWS.mask.sum(1).tolist() == ROWS.lengths and ROWS.mask[:, 0].tolist() == [True] * 4 + [False, True]
    part = ROWS.select([5, 0])
    assert part.responses == [[21, 2], [11, 12, 2]] and part.prompts == [[8, 9], [5, 6, 7]]
    assert part.ended.tolist() == [True, True]
    assert len(ROWS.select([])) == 0


def packed_tokens(rows: list[int]) -> int:
    return sum(map(len, {tuple(PROMPTS[row]) for row in rows})) + sum(len(RESPONSES[row]) for row in rows)


@pytest.mark.parametrize(
    "limits", [(None, 1), (None, 2), (None, 4), (None, 100), (1, None), (9, None), (12, 2), (99, None)]
)
def test_micro_batches_hold_each_row_once_longest_first_and_prompts_together(limits):
    max_tokens, max_rows = limits
    batches = list(micro_batches(ROWS, max_tokens, max_rows=max_rows))
    order = [row for batch in batches for row in batch]
    assert sorted(order) == list(range(6))
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or packed_tokens(batch) <= max_tokens or len(batch) == 1
    sizes = [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert sizes[order[0]] == max(sizes)
    places = {}
    for place, row in enumerate(order):
        places.setdefault(tuple(PROMPTS[row]), []).append(place)
    assert all(max(p) - min(p) == len(p) - 1 for p in places.values())


def test_a_budget_in_tokens_counts_a_shared_prompt_once_and_does_not_part_its_rows():
    """Prompts of 2, 3 and 1 tokens with 8, 4 and 3 tokens of responses: 10, 7 and 4 together."""
    assert list(micro_batches(ROWS, 21)) == [[1, 5, 0, 2, 4, 3]]
    assert list(micro_batches(ROWS, 20)) == [[1, 5, 0, 2, 4], [3]]
    assert list(micro_batches(ROWS, 16)) == [[1, 5], [0, 2, 4, 3]]  # 6 more tokens would fit, but not all rows of 0
    assert list(micro_batches(ROWS, 8)) == [[1], [5], [0, 2, 4], [3]]  # 2 + 6 and 2 + 2 tokens, then 3 + 4, then 4
    assert list(micro_batches(ROWS.select([]), 8)) == []


def test_a_budget_in_tokens_counts_a_system_prompt_once():
    system = [7] * 50
    rows = Conversations([[*system, k] for k in range(4)], [[5] * 4] * 4, torch.ones(4, dtype=torch.bool))
    assert list(micro_batches(rows, 70)) == [[0, 1, 2, 3]]  # 50 + 4 * 5
    assert list(micro_batches(rows, 69)) == [[0, 1, 2], [3]]
    assert list(micro_batches(rows, 60, max_rows=2)) == [[0, 1], [2, 3]]
    assert list(micro_batches(rows, 8)) == [[0], [1], [2], [3]]
    assert len(lay_out(rows.prompts, rows.responses).ids) == 70
    assert list(micro_batches(rows, 70, padded=True)) == [[0], [1], [2], [3]]  # 55 tokens each
    assert list(micro_batches(rows, 110, padded=True)) == [[0, 1], [2, 3]]
    assert list(micro_batches(rows, 200, padded=True)) == [[0, 1, 2], [3]]


@pytest.mark.filterwarnings("ignore:.*padded rows")
def test_a_padded_model_runs_no_more_tokens_at_once_than_the_budget_counts(build_family):
    """Rows whose prompt counts once are run whole where the model cannot share it: one after another, then."""
    model, prompt = build_family("gpt_oss"), [7] * 50
    rows = Conversations([prompt] * 6, [[k] * 4 for k in range(3, 9)], torch.ones(6, dtype=torch.bool))
    assert list(micro_batches(rows, 80)) == [[0, 1, 2, 3, 4, 5]] and not runs_padded(model)
    seen: list[tuple[int, ...]] = []
    trunk_of(model).register_forward_pre_hook(
        lambda _, __, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    states = response_states(model, rows)
    assert seen[-6:] == [(1, 54)] * 6  # 74 tokens hold one row of 54, not two
    assert len(states.flat) == 6 * 5  # and what nobody reads is not kept
    assert runs_padded(model)


def test_the_fingerprint_survives_loading_in_bfloat16_and_tells_weights_apart(tmp_path, small_sizes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(transformers.LlamaConfig(**small_sizes))
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


def test_a_model_whose_trunk_has_no_name_of_its_own_is_refused(tmp_path, small_sizes):
    config = transformers.Llama4TextConfig(**small_sizes | {"head_dim": 4, "num_local_experts": 2})
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Llama4ForCausalLM, whose transformer and head cannot be told apart"):
        load_causal_lm(str(tmp_path))


def test_a_reward_model_is_refused_where_a_language_model_is_wanted(head_dir, tiny_dir):
    """Its output weights are there, tied to the embeddings, so that nothing else would tell."""
    with pytest.raises(ValueError, match=rf"is a reward model \(segrew\.json\).*such as {tiny_dir}"):
        load_causal_lm(str(head_dir))


def test_a_length_beyond_the_context_is_refused(build_scorer_config):
    model = LlamaForSequenceClassification(build_scorer_config(max_position_embeddings=64))
    require_context(model, 64, "it")
    with pytest.raises(ValueError, match=r"--max_length 65: the context of it has 64 tokens.*set --max_length 64"):
        require_context(model, 65, "it")
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))
    require_context(bloom, 10**6, "it")  # its positions are distances, which nothing bounds


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


@pytest.mark.parametrize("load", [load_tokenizer, load_causal_lm, load_classifier, config_of])
def test_b50_code_that_comes_with_a_model_is_not_run(tmp_path, load):
    marker = tmp_path / "marker"
    (tmp_path / "odd.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {"AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M", "AutoModelForSequenceClassification": "odd.M"}
    write_json(tmp_path / "config.json", {"model_type": "odd", "auto_map": names})
    write_json(tmp_path / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["odd.T", None]}})
    with pytest.raises(ValueError, match=r"custom code|trust_remote_code"):
        load(str(tmp_path))
    assert not marker.exists()
