import math

import pytest
import torch

from reward_models import preference_loss
from reward_models.losses import reward_model_loss


def loss_and_gradient(differences, dtype=torch.float32, **kwargs):
    chosen = torch.tensor(differences, dtype=dtype, requires_grad=True)
    loss = preference_loss(chosen, torch.zeros(len(differences), dtype=dtype), **kwargs)
    loss.backward()
    return loss, chosen.grad * len(differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("difference", "loss", "slope"),
    [(-1000.0, 1000.0, -1.0), (-100.0, 100.0, -1.0), (0.0, 0.693147, -0.5), (100.0, 0.0, 0.0)],
)
def test_b20_huge_gaps_stay_finite(difference, loss, slope, dtype):
    got, gradient = loss_and_gradient([difference], dtype)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert gradient.item() == pytest.approx(slope, abs=1e-6)


def test_b20_a_lead_of_100_costs_next_to_nothing_but_not_less_than_nothing():
    loss, _ = loss_and_gradient([100.0])
    assert 0 <= loss.item() < 1e-30


def test_b20_a_margin_shifts_the_difference():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.0])
    margin = torch.tensor([0.25, 3.0])
    expected = sum(math.log1p(math.exp(-x)) for x in (2 - 0.5 - 0.25, -1 - 0 - 3)) / 2
    assert preference_loss(chosen, rejected, margin).item() == pytest.approx(expected, rel=1e-6)
    assert preference_loss(chosen, rejected, 0.25).item() == pytest.approx(
        preference_loss(chosen - 0.25, rejected).item(), rel=1e-6
    )


def test_bf16_scores_are_compared_in_float32():
    # 256 and 1 are exact in bfloat16, but their difference, 255, needs 8 bits and 256 + 1 would round to 256.
    chosen, rejected = torch.tensor([256.0]).bfloat16(), torch.tensor([-1.0]).bfloat16()
    loss = preference_loss(rejected, chosen)
    assert loss.item() == pytest.approx(257.0, abs=1e-6)


def test_equal_scores_cost_ln_2_and_a_common_constant_changes_nothing():
    scores = torch.tensor([0.3, -2.0, 5.0])
    assert preference_loss(scores, scores).item() == pytest.approx(math.log(2), rel=1e-6)
    other = torch.tensor([0.0, 1.0, 2.0])
    assert preference_loss(scores + 8, other + 8).item() == pytest.approx(
        preference_loss(scores, other).item(), rel=1e-5
    )


def test_b19_a_step_on_one_pair_raises_its_lead(build_scorer):
    """SGD at 0.1 on the tiny scorer: the chosen answer gains on the rejected one, whichever text that is."""
    for texts in (["good one", "bad"], ["bad", "good one"]):
        scorer = build_scorer("response")
        rows = [scorer.encode([{"role": "user", "content": "q"}], text) for text in texts]

        def lead(scorer=scorer, rows=rows) -> torch.Tensor:
            chosen, rejected = (
                scorer.head(scorer.model.model(torch.tensor([row.prompt + row.response])).last_hidden_state[:, -1])
                for row in rows
            )
            return chosen[:, 0] - rejected[:, 0]

        optimizer = torch.optim.SGD(scorer.model.parameters(), lr=0.1)
        before = lead()
        preference_loss(before, torch.zeros(1)).backward()
        optimizer.step()
        assert lead().item() > before.item()


def test_the_loss_of_a_batch_is_preference_plus_centering():
    """Rows 2i and 2i + 1 are a pair: differences 1 and −2, less margins 0.5 and 1; sums 3 and 4."""
    scores = torch.tensor([2.0, 1.0, 1.0, 3.0])
    expected = (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(3))) / 2
    margin = torch.tensor([0.5, 1.0])
    assert reward_model_loss(scores, margin=margin).item() == pytest.approx(expected)
    centred = reward_model_loss(scores, margin=margin, center_rewards_coefficient=0.01)
    assert centred.item() == pytest.approx(expected + 0.01 * (9 + 16) / 2)
