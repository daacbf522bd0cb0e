"""Features of the frozen segmenter: right per token, kept in the cache, and never a stale entry read."""

import pytest
import torch
from transformers import LlamaForCausalLM

from segrew import segmenter
from segrew.conversations import Conversations, in_rows, response_states, response_statistics
from segrew.segmentation import SegmentationConfig, segment
from segrew.segmenter import response_features

ROWS = Conversations(
    [[5, 6], [7], [5, 6], [8, 9, 10]],
    [[11, 12, 13, 2], [14, 2], [15], [16, 17, 18]],
    torch.tensor([True, True, False, False]),
)


@pytest.fixture
def model(build_scorer_config):
    torch.manual_seed(0)
    model = LlamaForCausalLM(build_scorer_config()).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def passes(monkeypatch) -> list:
    """The batches that the model was run on."""
    seen, run = [], segmenter.response_states
    monkeypatch.setattr(segmenter, "response_states", lambda m, rows: seen.append(len(rows)) or run(m, rows))
    return seen


@pytest.mark.parametrize("max_tokens", [1, 9, 8192])
@pytest.mark.parametrize("chunk", [2, 512])
def test_features_are_those_of_each_row_alone(model, monkeypatch, max_tokens, chunk):
    monkeypatch.setattr(segmenter, "CHUNK_ROWS", chunk)
    found = response_features(model, ROWS, max_tokens=max_tokens, with_states=True)
    flat = 0
    for row, length in enumerate(ROWS.lengths):
        alone = ROWS.select([row])
        with torch.no_grad():
            logprobs, entropy = response_statistics(model, alone)
            states = response_states(model, alone).at
        torch.testing.assert_close(found.entropy[row, :length], entropy[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.logprobs[row, :length], logprobs[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.states[flat : flat + length], states, atol=1e-5, rtol=1e-5)
        flat += length
    assert flat == len(found.states)
    assert found.entropy[~ROWS.mask].abs().sum() == 0 == found.logprobs[~ROWS.mask].abs().sum()


@pytest.mark.parametrize("with_states", [True, False])
def test_rows_of_features_are_those_rows_features(model, with_states):
    whole = response_features(model, ROWS, with_states=with_states)
    for rows in ([3, 0], [2], [1, 2, 3]):
        alone = response_features(model, ROWS.select(rows), with_states=with_states, store=False)
        logprobs, entropy, *states = whole.of_rows(rows, ROWS.lengths)
        torch.testing.assert_close(logprobs, alone.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, alone.entropy, atol=1e-5, rtol=1e-5)
        if with_states:
            mask = ROWS.select(rows).mask
            laid_out = in_rows(states[0], mask)
            torch.testing.assert_close(laid_out[mask], alone.states, atol=1e-5, rtol=1e-5)
            assert laid_out[~mask].abs().sum() == 0
        else:
            assert not states


def test_a_second_reading_and_another_threshold_cost_no_pass(model, passes):
    first = response_features(model, ROWS)
    assert sum(passes) == 4
    second = response_features(model, ROWS)
    assert (
        sum(passes) == 4 and torch.equal(first.entropy, second.entropy) and torch.equal(first.logprobs, second.logprobs)
    )
    counts = [
        int(segment(SegmentationConfig(threshold=t), ROWS.mask, entropy=second.entropy).counts.sum())
        for t in (0.0, 99.0)
    ]
    assert counts == [10, 4]


def test_a_pass_with_states_serves_one_without(model, passes):
    with_states = response_features(model, ROWS, with_states=True)
    without = response_features(model, ROWS)
    assert sum(passes) == 4 and without.states is None and torch.equal(without.entropy, with_states.entropy)


def test_an_interrupted_pass_goes_on_at_its_last_chunk(model, passes, monkeypatch):
    monkeypatch.setattr(segmenter, "CHUNK_ROWS", 2)
    response_features(model, ROWS.select([0, 1]))
    response_features(model, ROWS)
    assert sum(passes) == 4


@pytest.mark.parametrize(
    "change", ["a weight", "the output weights", "a token", "a prompt", "the dtype", "a cap in the configuration"]
)
def test_whatever_changes_the_outcome_is_computed_anew(model, passes, change):
    response_features(model, ROWS)
    rows = ROWS
    if change == "a weight":
        model.model.layers[1].mlp.down_proj.weight.data[-1, -1] += 1
    elif change == "the output weights":
        model.lm_head.weight.data[-1, -1] += 1
    elif change == "a token":
        rows = Conversations(ROWS.prompts, [*ROWS.responses[:3], [16, 17, 19]], ROWS.ended)
    elif change == "a prompt":
        rows = Conversations([[5, 6], [6], [5, 6], [8, 9, 10]], ROWS.responses, ROWS.ended)
    elif change == "a cap in the configuration":
        model.config.final_logit_softcapping = 2.0
    else:
        model.bfloat16()
    response_features(model, rows)
    assert sum(passes) == 8


def test_nothing_is_kept_unless_asked_for(model, empty_cache):
    response_features(model, ROWS, store=False)
    assert not empty_cache.exists()
    response_features(model, ROWS)
    assert [path.suffix for path in (empty_cache / "features").iterdir()] == [".arrow"]


def test_a_spike_of_entropy_after_a_token_opens_a_unit_at_the_next(build_scorer_config):
    """Invariant 5: the model is unsure after token 20 alone, so whatever follows a 20 opens a unit."""
    model = LlamaForCausalLM(build_scorer_config(num_hidden_layers=1)).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0  # every token points one way, token 20 another
        model.model.embed_tokens.weight[20] = torch.eye(16)[1]
        model.lm_head.weight.zero_()[7, 0] = 20.0  # that way is a sure 7; the other is uniform over 300
    rows = Conversations([[20], [5]], [[9, 20, 9, 9, 20, 9], [20, 20, 9, 9, 9, 2]], torch.tensor([False, True]))
    entropy = response_features(model, rows).entropy
    uniform = torch.tensor(300.0).log().item()
    assert entropy[0].tolist() == pytest.approx([uniform, 0, uniform, 0, 0, uniform], abs=1e-4)
    units = segment(SegmentationConfig(threshold=1.0), rows.mask, entropy=entropy)
    assert units.ids.tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2]]


def test_a_damaged_entry_costs_a_pass_and_a_line_not_the_run(model, passes, empty_cache):
    first = response_features(model, ROWS)
    (entry,) = (empty_cache / "features").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    with pytest.warns(UserWarning, match="computed anew"):
        second = response_features(model, ROWS)
    third = response_features(model, ROWS)
    assert sum(passes) == 8 and torch.equal(first.entropy, second.entropy) and torch.equal(first.entropy, third.entropy)
