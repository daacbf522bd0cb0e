"""Zero-cost token credits against what they stand for: scores of prefixes, and the model's own attention weights."""

import pytest
import torch

from reward_models.token_credit import final_attention, prefix_values
from segrew.conversations import Conversations


def conversations(scorer, texts):
    rows = [scorer.encode([{"role": "user", "content": "why?"}], text) for text in texts]
    return Conversations([r.prompt for r in rows], [r.response for r in rows], torch.tensor([r.ended for r in rows]))


def test_prefix_values_are_the_scores_of_prefixes(build_scorer):
    scorer = build_scorer("response")
    part = conversations(scorer, ["abcde", "xy"])
    after, before = prefix_values(scorer.model, scorer.head, part)
    for row, ids in enumerate(part.responses):
        for j in range(len(ids) + 1):
            tokens = torch.tensor([part.prompts[row] + ids[:j]])
            with torch.no_grad():
                alone = scorer.head(scorer.model.model(tokens).last_hidden_state[0, -1]).item()
            if j:
                assert after[row, j - 1].item() == pytest.approx(alone, abs=1e-4)
            if j < len(ids):
                assert before[row, j].item() == pytest.approx(alone, abs=1e-4)
        total = (after - before)[row, : len(ids)].sum().item()
        assert total == pytest.approx((after[row, len(ids) - 1] - before[row, 0]).item(), abs=1e-4)


def test_final_attention_is_the_last_layers_mean_over_heads(build_scorer):
    scorer = build_scorer("response")
    part = conversations(scorer, ["abcde"])
    prompt, response = part.prompts[0], part.responses[0]
    previous = scorer.model.config._attn_implementation
    shares = final_attention(scorer.model, prompt, response)
    assert scorer.model.config._attn_implementation == previous
    scorer.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = scorer.model.model(torch.tensor([prompt + response]), output_attentions=True).attentions
    expected = weights[-1][0, :, -1, len(prompt) :].mean(0)
    torch.testing.assert_close(shares, expected / expected.sum(), atol=1e-5, rtol=1e-4)
    assert shares.shape == (len(response),) and shares.sum().item() == pytest.approx(1.0)


def test_a_model_without_attention_weights_is_named(build_scorer):
    scorer = build_scorer("response")
    for module in scorer.model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 99  # no layer is the last one
    with pytest.raises(ValueError, match=r"LlamaModel.*no attention weights"):
        final_attention(scorer.model, [5], [6, 7])
