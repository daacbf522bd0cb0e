"""The losses against plain loops over units, their limits, and the KL estimates of field report B26."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy.losses import kl_estimates, policy_loss, value_loss
from policy.reward_shaping import spread_rewards
from segrew.advantages import generalized_advantages, leave_one_out, macro_advantages
from segrew.macro_actions import sum_by_unit
from segrew.segmentation import Segmentation, segment_by_ngram, segment_by_response, segment_by_token

RATIOS = ("token", "joint", "geometric")
REDUCTIONS = ("token", "sequence", "unit")

# Units of 2+3+1, 4, none and 1+2 tokens; one row starts at column 2.
IDS = torch.tensor(
    [
        [0, 0, 1, 1, 1, 2],
        [-1, -1, 0, 0, 0, 0],
        [-1, -1, -1, -1, -1, -1],
        [0, 1, 1, -1, -1, -1],
    ]
)


def segmentation() -> Segmentation:
    return Segmentation(IDS)


def per_unit(values: list[list[float]]) -> torch.Tensor:
    """Give each token the value of its unit, by a plain loop."""
    rows = [[values[i][k] if k >= 0 else 0.0 for k in row] for i, row in enumerate(IDS.tolist())]
    return torch.tensor(rows)


def inputs(seed: int = 0, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new = -2 * torch.rand(IDS.shape, generator=generator)
    old = new + spread * torch.randn(IDS.shape, generator=generator)
    return new.requires_grad_(), old, per_unit([[1.5, -0.7, 0.4], [-1.1], [], [0.9, -2.0]])


def units() -> list[tuple[int, list[int]]]:
    """(row, columns) of every unit."""
    found = []
    for i, row in enumerate(IDS.tolist()):
        for k in range(max(row) + 1):
            found.append((i, [j for j, unit in enumerate(row) if unit == k]))
    return found


def surrogate(r: float, a: float, clip: float) -> float:
    return min(r * a, max(min(r, 1 + clip), 1 - clip) * a)


def loop_loss(new, old, advantages, *, clip: float, ratio: str, reduction: str) -> float:
    """The loss by a loop over units, in float64."""
    new, old, advantages = new.double().tolist(), old.double().tolist(), advantages.double().tolist()
    totals = []
    for i, columns in units():
        logs = [new[i][j] - old[i][j] for j in columns]
        a = advantages[i][columns[0]]
        if ratio == "token":
            total = sum(surrogate(math.exp(x), a, clip) for x in logs)
        elif ratio == "joint":
            total = surrogate(math.exp(sum(logs)), a, clip)
        else:
            total = len(logs) * surrogate(math.exp(sum(logs) / len(logs)), a, clip)
        totals.append((i, len(columns), total))
    if reduction == "unit":
        return -sum(total / size for _, size, total in totals) / len(totals)
    if reduction == "token":
        return -sum(total for _, _, total in totals) / sum(size for _, size, _ in totals)
    rows = {i for i, _, _ in totals}
    means = [sum(t for i, _, t in totals if i == r) / sum(n for i, n, _ in totals if i == r) for r in rows]
    return -sum(means) / len(rows)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_policy_loss_equals_a_loop_over_units(ratio, reduction):
    new, old, advantages = inputs()
    loss, stats = policy_loss(new, old, advantages, segmentation(), clip=0.2, ratio=ratio, reduction=reduction)
    expected = loop_loss(new.detach(), old, advantages, clip=0.2, ratio=ratio, reduction=reduction)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert not any(value.requires_grad for value in stats.values())


def test_stats_count_what_the_clip_took():
    # One response, tokens as units. log-ratios ln 2, 0, −ln 2, ln 2 with advantages +1, +1, −1, −1: the
    # first and the third are clipped (2 > 1.2 with A > 0; 0.5 < 0.8 with A < 0).
    log_ratio = torch.tensor([[math.log(2.0), 0.0, -math.log(2.0), math.log(2.0)]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    tokens = segment_by_token(torch.ones(1, 4, dtype=torch.bool))
    _, stats = policy_loss(log_ratio, torch.zeros(1, 4), advantages, tokens, clip=0.2)
    assert stats["clip_fraction"].item() == pytest.approx(0.5)
    assert stats["ratio_max"].item() == pytest.approx(2.0)
    # Of samples from π_old: ρ − 1 − ln ρ.
    expected = (2 * (1 - math.log(2)) + 0 + (-0.5 + math.log(2))) / 4
    assert stats["approx_kl"].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_three_ratios_have_one_gradient_at_old_equals_new(reduction):
    """Invariant 31, with the gradient written out: −weight · A for each token."""
    new, _, advantages = inputs()
    weights = torch.zeros(IDS.shape)
    for i, columns in units():
        tokens_in_row = sum(len(c) for r, c in units() if r == i)
        divisor = {"token": 13, "sequence": 3 * tokens_in_row, "unit": 6 * len(columns)}[reduction]
        weights[i, columns] = 1 / divisor
    for ratio in RATIOS:
        loss, stats = policy_loss(new, new.detach(), advantages, segmentation(), ratio=ratio, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, new)
        torch.testing.assert_close(gradient, -weights * advantages)
        assert stats["ratio_max"].item() == 1.0 and stats["clip_fraction"].item() == 0.0


def test_joint_ratio_is_the_product_and_geometric_its_root():
    """Invariant 32: with A = 1 and no clip, the loss of one unit is −c·ratio/tokens."""
    log_ratio = torch.tensor([[0.1, -0.3, 0.5]])
    one = segment_by_response(torch.ones(1, 3, dtype=torch.bool))
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    joint, _ = policy_loss(log_ratio, zeros, ones, one, clip=1e6, ratio="joint")
    geometric, _ = policy_loss(log_ratio, zeros, ones, one, clip=1e6, ratio="geometric")
    assert -3 * joint.item() == pytest.approx(math.exp(0.3), rel=1e-6)
    assert -geometric.item() == pytest.approx(math.exp(0.3) ** (1 / 3), rel=1e-6)
    singles = segment_by_token(torch.ones(1, 3, dtype=torch.bool))
    losses = [policy_loss(log_ratio, zeros, ones, singles, ratio=r)[0].item() for r in RATIOS]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-7)


@pytest.mark.parametrize("ratio", RATIOS)
def test_beyond_the_clip_the_gradient_is_zero(ratio):
    one = segment_by_response(torch.ones(1, 2, dtype=torch.bool))
    for sign in (1.0, -1.0):
        new = torch.full((1, 2), sign * 0.3, requires_grad=True)
        loss, _ = policy_loss(new, torch.zeros(1, 2), sign * torch.ones(1, 2), one, clip=0.2, ratio=ratio)
        loss.backward()
        assert torch.equal(new.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("ratio", RATIOS)
def test_extreme_log_ratios_stay_finite(ratio):
    one = segment_by_response(torch.ones(2, 3, dtype=torch.bool))
    for shift in (-1e4, 1e4):
        new = torch.full((2, 3), shift, requires_grad=True)
        loss, stats = policy_loss(new, torch.zeros(2, 3), torch.tensor([[1.0], [-1.0]]).expand(2, 3), one, ratio=ratio)
        loss.backward()
        assert loss.isfinite() and new.grad.isfinite().all() and all(v.isfinite() for v in stats.values())


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_holds_anything(ratio, reduction):
    new, old, advantages = inputs()
    clean, _ = policy_loss(new, old, advantages, segmentation(), ratio=ratio, reduction=reduction)
    (clean_gradient,) = torch.autograd.grad(clean, new)
    hole = IDS < 0
    dirty = [
        x.detach().masked_fill(hole, v)
        for x, v in zip((new, old, advantages), (math.nan, math.inf, math.nan), strict=True)
    ]
    dirty[0].requires_grad_()
    loss, stats = policy_loss(*dirty, segmentation(), ratio=ratio, reduction=reduction)
    loss.backward()
    assert loss.item() == pytest.approx(clean.item(), abs=1e-7)
    torch.testing.assert_close(dirty[0].grad, clean_gradient)
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_accumulate_to_the_batch(ratio, reduction):
    new, old, advantages = inputs()
    whole, _ = policy_loss(new, old, advantages, segmentation(), ratio=ratio, reduction=reduction)
    total = {"token": 13, "sequence": 3, "unit": 6}[reduction]
    parts = [
        policy_loss(
            new[rows], old[rows], advantages[rows], Segmentation(IDS[rows]),
            ratio=ratio, reduction=reduction, normalizer=total,
        )[0]
        for rows in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-6)


def test_token_mean_is_the_length_weighted_mean_over_units():
    """Invariant 33, at ratio 1 where a unit's surrogate is its advantage."""
    new, _, advantages = inputs()
    loss, _ = policy_loss(new, new.detach(), advantages, segmentation())
    by_hand = -(2 * 1.5 + 3 * -0.7 + 1 * 0.4 + 4 * -1.1 + 1 * 0.9 + 2 * -2.0) / 13
    assert loss.item() == pytest.approx(by_hand, abs=1e-6)


def test_no_tokens_at_all_give_zero():
    nothing = Segmentation(torch.full((2, 3), -1))
    x = torch.zeros(2, 3)
    for reduction in REDUCTIONS:
        assert policy_loss(x, x, x, nothing, reduction=reduction)[0].item() == 0.0
    assert value_loss(x, x, x, nothing.mask)[0].item() == 0.0


def test_value_loss_equals_a_loop_over_tokens():
    mask = IDS >= 0
    generator = torch.Generator().manual_seed(3)
    v, old, g = (torch.randn(IDS.shape, generator=generator) for _ in range(3))
    for clip in (None, 0.2):
        errors, taken = [], []
        for a, b, c in zip(v[mask].tolist(), old[mask].tolist(), g[mask].tolist(), strict=True):
            inside = a if clip is None else b + max(-clip, min(clip, a - b))
            errors.append(max((a - c) ** 2, (inside - c) ** 2))
            taken.append((inside - c) ** 2 > (a - c) ** 2)
        dirty = v.masked_fill(~mask, math.nan).requires_grad_()
        loss, stats = value_loss(dirty, old.masked_fill(~mask, math.inf), g, mask, clip=clip)
        assert loss.item() == pytest.approx(0.5 * sum(errors) / 13, abs=1e-6)
        assert stats["clip_fraction"].item() == pytest.approx(sum(taken) / 13)
        loss.backward()
        assert dirty.grad.isfinite().all() and not dirty.grad[~mask].any()


def test_value_clip_is_inactive_at_the_old_values():
    mask = IDS >= 0
    v = torch.randn(IDS.shape, generator=torch.Generator().manual_seed(4)).requires_grad_()
    clipped, stats = value_loss(v, v.detach(), torch.ones(IDS.shape), mask, clip=0.2)
    plain, _ = value_loss(v, v.detach(), torch.ones(IDS.shape), mask)
    assert clipped.item() == plain.item() and stats["clip_fraction"].item() == 0.0
    torch.testing.assert_close(*(torch.autograd.grad(x, v)[0] for x in (clipped, plain)))


@pytest.mark.parametrize("ratio", RATIOS)
def test_unigram_macros_are_token_ppo(ratio):
    """Invariant 25: advantages, returns, losses and gradients at n = 1 are those of token PPO."""
    mask = IDS >= 0
    generator = torch.Generator().manual_seed(5)
    u, v = (torch.randn(IDS.shape, generator=generator) for _ in range(2))
    new, old, _ = inputs()
    unigrams = segment_by_ngram(mask, 1)
    advantages, returns = macro_advantages(u, v, unigrams, gamma=0.97, lambda_=0.9)
    expected = torch.zeros(IDS.shape, dtype=torch.float64)
    for i, row in enumerate(mask.tolist()):
        following, following_value = 0.0, 0.0
        for j in [j for j, real in enumerate(row) if real][::-1]:
            delta = u[i, j].item() + 0.97 * following_value - v[i, j].item()
            following = delta + 0.97 * 0.9 * following
            following_value = v[i, j].item()
            expected[i, j] = following
    torch.testing.assert_close(advantages.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns.double(), (expected + v.double()) * mask, atol=1e-6, rtol=0)

    loss, _ = policy_loss(new, old, advantages, unigrams, ratio=ratio)
    reference = new.double() - old.double()
    unclipped, clipped = reference.exp() * expected, reference.exp().clamp(0.8, 1.2) * expected
    token_loss = -torch.minimum(unclipped, clipped)[mask].mean()
    assert loss.item() == pytest.approx(token_loss.item(), abs=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(x, new)[0] for x in (loss, token_loss)), atol=1e-6, rtol=0)


def test_one_macro_without_a_critic_is_reinforce_with_a_group_baseline():
    """Invariant 26: A = Σu − V; with the group baseline as V the gradient is RLOO's estimator."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    scores = torch.tensor([2.0, -1.0, 0.5, 3.0])
    whole = segment_by_ngram(mask, None)
    u = spread_rewards(scores[:, None], whole, how="even")
    advantages, _ = macro_advantages(u, torch.zeros(4, 4), whole, gamma=1.0, lambda_=0.95)
    torch.testing.assert_close(advantages, scores[:, None] * mask, atol=1e-6, rtol=0)

    baselined = leave_one_out(scores, 4)[:, None] * mask
    new = torch.randn(4, 4, generator=torch.Generator().manual_seed(6)).requires_grad_()
    loss, _ = policy_loss(new, new.detach(), baselined, whole, ratio="joint", reduction="token")
    s = scores.tolist()
    baselines = [sum(s[k] for k in range(4) if k != i) / 3 for i in range(4)]
    rloo = -sum((s[i] - baselines[i]) * new[i][mask[i]].sum() for i in range(4)) / mask.sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, new)[0] for x in (loss, rloo)), atol=1e-6, rtol=0)


def test_even_split_and_last_token_are_one_for_coinciding_macros():
    """Invariant 27: same macro rewards, advantages and loss."""
    rewards = torch.tensor([[0.4, -1.0, 2.0], [0.7, 0, 0], [0, 0, 0], [1.0, -3.0, 0]])
    new, old, _ = inputs()
    values = torch.randn(IDS.shape, generator=torch.Generator().manual_seed(7))
    results = []
    for how in ("even", "last"):
        u = spread_rewards(rewards, segmentation(), how=how)
        advantages, _ = macro_advantages(u, values, segmentation(), gamma=1.0, lambda_=0.95)
        loss, _ = policy_loss(new, old, advantages, segmentation())
        results.append((sum_by_unit(u, segmentation()), advantages, loss))
    for even, last in zip(*results, strict=True):
        torch.testing.assert_close(even, last, atol=1e-6, rtol=0)


def test_b04_no_leak_from_padding_into_advantages():
    """B04 d, e: what stands in padding reaches neither advantages nor returns."""
    mask = torch.tensor([[True, True, True, False, False]])
    rewards, zeros = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]), torch.zeros(1, 5)
    advantages, _ = generalized_advantages(rewards, zeros, mask, gamma=1.0, lambda_=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    advantages, _ = generalized_advantages(rewards, zeros, mask, gamma=0.0, lambda_=1.0)
    assert advantages.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]
    leaky = torch.tensor([[0.5, 2.0, 3.0, 3.0]])
    mask = torch.tensor([[True, True, False, False]])
    _, returns = generalized_advantages(leaky, torch.zeros(1, 4), mask, gamma=1.0, lambda_=1.0)
    assert returns.tolist() == [[2.5, 2.0, 0.0, 0.0]]


def test_b26_kl_estimates():
    """B26 b: one estimate may be negative and is not clipped; k3 never is."""
    k1, k2, k3 = kl_estimates(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    torch.testing.assert_close(k1, torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(k2, torch.tensor([0.125, 0.5]))
    torch.testing.assert_close(k3, torch.tensor([0.106531, 0.718282]), atol=1e-6, rtol=0)


def test_b26_identical_policies_have_kl_exactly_zero():
    x = -5 * torch.rand(3, 7)
    assert all(torch.equal(k, torch.zeros(3, 7)) for k in kl_estimates(x, x.clone()))


@given(st.floats(-1e3, 0, width=32), st.floats(-30, 30, width=32))
def test_k3_is_the_exponential_form_and_never_negative(logprob, difference):
    reference = torch.tensor([logprob]) - difference
    _, _, k3 = kl_estimates(torch.tensor([logprob]), reference)
    d = logprob - reference.double().item()
    assert k3.item() >= 0
    assert k3.item() == pytest.approx(math.expm1(-d) + d, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("pair", [(-3e38, 3e38), (3e38, -3e38), (-1e4, 0.0), (0.0, -1e4), (-1e20, 1e20)])
def test_kl_estimates_and_gradients_are_finite(pair):
    x = torch.tensor([pair[0]], requires_grad=True)
    for estimate in kl_estimates(x, torch.tensor([pair[1]])):
        (gradient,) = torch.autograd.grad(estimate.sum(), x, retain_graph=True)
        assert estimate.isfinite().all() and gradient.isfinite().all()


def test_k3_still_pulls_where_the_exponential_would_overflow():
    x = torch.tensor([-500.0], requires_grad=True)
    kl_estimates(x, torch.tensor([0.0]))[2].sum().backward()
    assert x.grad.item() < -1e10


def test_clip_higher_moves_only_the_upper_bound():
    """Ratios 1.25 and 0.75 with ε = 0.2 below and 0.3 above: the first is no longer clipped."""
    log_ratio = torch.tensor([[math.log(1.25), math.log(0.75), math.log(1.5)]])
    advantages = torch.tensor([[1.0, -1.0, 2.0]])
    tokens = segment_by_token(torch.ones(1, 3, dtype=torch.bool))
    loss, stats = policy_loss(log_ratio, torch.zeros(1, 3), advantages, tokens, clip=0.2, clip_high=0.3)
    assert loss.item() == pytest.approx(-(1.25 - 0.8 + 2 * 1.3) / 3, abs=1e-6)
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    """Ratio 10 with A = −2: the loss stops at c·|A| = 6, without a gradient; a positive advantage is left alone."""
    log_ratio = torch.full((1, 2), math.log(10.0), requires_grad=True)
    advantages = torch.tensor([[-2.0, 2.0]])
    tokens = segment_by_token(torch.ones(1, 2, dtype=torch.bool))
    plain, _ = policy_loss(log_ratio, torch.zeros(1, 2), advantages, tokens, clip=0.2)
    dual, stats = policy_loss(log_ratio, torch.zeros(1, 2), advantages, tokens, clip=0.2, dual_clip=3.0)
    assert plain.item() == pytest.approx((20 - 2.4) / 2, rel=1e-5)
    assert dual.item() == pytest.approx((6 - 2.4) / 2, rel=1e-5)
    assert stats["clip_fraction"].item() == 1.0
    dual.backward()
    assert log_ratio.grad.tolist() == [[0.0, 0.0]]
