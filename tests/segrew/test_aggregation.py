import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.nn.functional import logsigmoid

from segrew.aggregation import aggregate, attention_weights
from segrew.segmentation import segment_by_response, segment_by_token

NAN = float("nan")
KINDS = ("mean", "sum", "softmax", "softmin", "log_mean_exp", "softmax_weighted", "max", "min", "last")


def every(count: int, rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, count, dtype=torch.bool)


@pytest.mark.parametrize(
    ("temperature", "softmax", "log_mean_exp", "softmax_weighted", "softmin"),
    [
        (0.5, 2.07147, 1.52216, 1.85094, -0.07147),
        (1.0, 2.40761, 1.30899, 1.57521, -0.40761),
        (2.0, 3.36054, 1.16331, 1.32016, -1.36054),
    ],
)
def test_golden_scores_of_0_1_2(temperature, softmax, log_mean_exp, softmax_weighted, softmin):
    golden = {
        "softmax": softmax,
        "log_mean_exp": log_mean_exp,
        "softmax_weighted": softmax_weighted,
        "softmin": softmin,
        "mean": 1.0,
        "sum": 3.0,
        "max": 2.0,
        "min": 0.0,
        "last": 2.0,
    }
    for kind, expected in golden.items():
        score = aggregate(torch.tensor([[0.0, 1.0, 2.0]]), every(3), kind=kind, temperature=temperature)
        assert score.item() == pytest.approx(expected, abs=1e-5), kind


def test_limits_in_the_temperature():
    """Invariant 12."""
    x = torch.tensor([[0.0, 1.0, 2.0]])
    for kind in ("softmax", "log_mean_exp", "softmax_weighted"):
        assert aggregate(x, every(3), kind=kind, temperature=1e-3).item() == pytest.approx(2.0, abs=2e-3)
    hot = 1e3
    assert aggregate(x, every(3), kind="log_mean_exp", temperature=hot).item() == pytest.approx(1.0, abs=1e-3)
    assert aggregate(x, every(3), kind="softmax_weighted", temperature=hot).item() == pytest.approx(1.0, abs=1e-3)
    softmax = aggregate(x, every(3), kind="softmax", temperature=hot).item()
    assert softmax == pytest.approx(hot * math.log(3) + 1.0, abs=1e-3)


def test_equal_rewards_give_that_reward_and_the_sum_counts_them():
    for count in (1, 2, 7):
        x = torch.full((1, count), 1.7)
        for kind in ("mean", "log_mean_exp", "softmax_weighted", "max", "min", "last"):
            assert aggregate(x, every(count), kind=kind).item() == pytest.approx(1.7, abs=1e-6), kind
        assert aggregate(x, every(count), kind="sum").item() == pytest.approx(1.7 * count, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8), st.floats(0.25, 4))
def test_order_bounds_and_symmetry(rewards: list[float], temperature: float):
    """Invariant 12."""

    def score(kind, values=rewards):
        return aggregate(torch.tensor([values]), every(len(values)), kind=kind, temperature=temperature).item()

    slack = 1e-4
    assert score("softmax") >= max(rewards) - slack
    assert sum(rewards) / len(rewards) - slack <= score("log_mean_exp") <= max(rewards) + slack
    assert score("softmin") == pytest.approx(-score("softmax", [-r for r in rewards]), abs=slack)
    for kind in KINDS[:-1]:
        assert score(kind, rewards[::-1]) == pytest.approx(score(kind), abs=slack), kind


def test_one_unit_makes_every_kind_the_bandit_score():
    """Invariant 13."""
    for kind in KINDS:
        assert aggregate(torch.tensor([[0.73]]), every(1), kind=kind, temperature=0.5).item() == pytest.approx(0.73)
    assert aggregate(
        torch.tensor([[0.73]]), every(1), kind="learned", weights=torch.ones(1, 1)
    ).item() == pytest.approx(0.73)


def test_response_units_read_the_last_token_and_token_units_average_them_all():
    mask = torch.tensor([[True, True, True, False], [False, True, True, True]])
    readings = torch.tensor([[1.0, 2.0, 6.0, NAN], [NAN, 4.0, 5.0, 0.0]])
    bandit, token = segment_by_response(mask), segment_by_token(mask)
    assert aggregate(readings.gather(1, bandit.ends), bandit.unit_mask).tolist() == [6.0, 0.0]
    assert aggregate(readings.gather(1, token.ends), token.unit_mask).tolist() == [3.0, 3.0]


def test_gradient_of_mean_is_uniform_and_of_softmax_is_the_softmax():
    """Invariant 12."""
    x = torch.tensor([[0.3, -1.0, 2.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    (mean,) = torch.autograd.grad(aggregate(x, mask).sum(), x)
    torch.testing.assert_close(mean, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))
    (soft,) = torch.autograd.grad(aggregate(x, mask, kind="softmax", temperature=0.5).sum(), x)
    weights = [math.exp(r / 0.5) for r in (0.3, -1.0, 2.0)]
    torch.testing.assert_close(soft, torch.tensor([[w / sum(weights) for w in weights] + [0.0]]))


@pytest.mark.parametrize("kind", [*KINDS, "learned"])
def test_padding_and_empty_rows_reach_neither_value_nor_gradient(kind):
    """Invariant 13."""
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    x = torch.tensor([[1.0, 3.0, NAN], [NAN, NAN, NAN], [0.5, -0.5, 2.0]], requires_grad=True)
    weights = torch.tensor([[0.25, 0.75, NAN], [NAN, NAN, NAN], [0.1, 0.2, 0.7]])
    scores = aggregate(x, mask, kind=kind, weights=weights)
    alone = aggregate(x.detach()[:1, :2], every(2), kind=kind, weights=weights[:1, :2])
    assert scores[0].item() == pytest.approx(alone.item()) and scores[1].item() == 0
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way back either
        scores.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[~mask].any() and x.grad[2].any()


def test_learned_weights_are_a_dot_product():
    score = aggregate(torch.tensor([[1.0, 3.0]]), every(2), kind="learned", weights=torch.tensor([[0.25, 0.75]]))
    assert score.item() == 2.5
    with pytest.raises(ValueError, match="needs weights"):
        aggregate(torch.ones(1, 2), every(2), kind="learned")


def test_attention_weights_are_a_softmax_over_real_units():
    mask = torch.tensor([[True, True, True, False], [False] * 4])
    logits = torch.tensor([[0.0, 1.0, 2.0, NAN], [NAN] * 4], requires_grad=True)
    weights = attention_weights(logits, mask, temperature=0.5)
    expected = [math.exp(x / 0.5) for x in (0, 1, 2)]
    assert weights[0].tolist() == pytest.approx([w / sum(expected) for w in expected] + [0.0])
    assert weights[1].tolist() == [0.0] * 4
    weights[0, 1].backward()
    assert logits.grad.isfinite().all() and not logits.grad[~mask].any()


def test_bradley_terry_of_equal_scores_is_ln_2_and_a_shift_cancels_except_in_the_sum():
    """Invariant 15."""
    chosen, rejected = torch.tensor([[0.2, 1.0, -0.4]]), torch.tensor([[0.9, -0.1, NAN]])
    rejected_mask = torch.tensor([[True, True, False]])

    def loss(kind, shift):
        e_w = aggregate(chosen + shift, every(3), kind=kind)
        return -logsigmoid(e_w - aggregate(rejected + shift, rejected_mask, kind=kind)).item()

    for kind in ("mean", "softmax"):
        assert loss(kind, 5.0) == pytest.approx(loss(kind, 0.0), abs=1e-6)
    assert abs(loss("sum", 5.0) - loss("sum", 0.0)) > 0.1
    e = aggregate(chosen, every(3))
    assert -logsigmoid(e - e).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, float("inf")])
def test_temperature_must_be_positive(temperature: float):
    with pytest.raises(ValueError, match="temperature"):
        aggregate(torch.ones(1, 2), every(2), temperature=temperature)


def test_unknown_kind_is_named():
    with pytest.raises((ValueError, TypeCheckError), match="median"):
        aggregate(torch.ones(1, 2), every(2), kind="median")


def test_bfloat16_rewards_are_aggregated_in_float32():
    score = aggregate(torch.full((1, 300), 1.0078125).bfloat16(), every(300), kind="sum")
    assert score.dtype == torch.float32 and score.item() == 302.34375
