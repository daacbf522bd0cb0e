import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from policy.losses import policy_loss, value_loss
from policy.reward_shaping import spread_rewards
from segrew.advantages import generalized_advantages, group_moments, leave_one_out, macro_advantages
from segrew.macro_actions import sum_by_unit, value_by_unit
from segrew.masking import masked_mean, masked_whiten
from segrew.segmentation import Segmentation, segment_by_ngram, segment_by_response, segment_by_token

NAN = float("nan")
# The example of method section 3: γ = 1, λ = 0.95, units [0,1][2,3,4][5].
REWARDS = torch.tensor([[0.1, -0.2, 0.3, 0.0, 0.5, 1.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1, 0.05]])
UNITS = Segmentation(torch.tensor([[0, 0, 1, 1, 1, 2]]))


def brute_gae(rewards, values, gammas, lambdas, bootstrap=0.0):
    """One row, plain floats, last token first."""
    advantages, following, next_value = [], 0.0, bootstrap
    for r, v, g, lam in zip(rewards[::-1], values[::-1], gammas[::-1], lambdas[::-1], strict=True):
        following = r + g * next_value - v + g * lam * following
        advantages.insert(0, following)
        next_value = v
    return advantages


def brute_macro(rewards, values, lengths, gamma, lambda_, scheme, gamma_scale, lambda_scale):
    """Advantages and returns of one row's tokens, from the definition, in plain floats."""
    r_units, v_units, start = [], [], 0
    for n in lengths:
        r, v = rewards[start : start + n], values[start : start + n]
        rho = gamma if gamma_scale == "token" else 1.0
        r_units.append(sum(rho**i * x for i, x in enumerate(r)))
        sigma = {
            "mean": [1.0] * n,
            "first": [1.0] + [0.0] * (n - 1),
            "last": [0.0] * (n - 1) + [1.0],
            "decayed": [1 / (n - i) for i in range(n)],
        }[scheme]
        v_units.append(sum(s * x for s, x in zip(sigma, v, strict=True)) / sum(sigma))
        start += n
    gammas = [gamma**n if gamma_scale == "token" else gamma for n in lengths]
    lambdas = [lambda_**n if lambda_scale == "token" else lambda_ for n in lengths]
    a_units = brute_gae(r_units, v_units, gammas, lambdas)
    advantages = [a for a, n in zip(a_units, lengths, strict=True) for _ in range(n)]
    returns = [a + v for a, v, n in zip(a_units, v_units, lengths, strict=True) for _ in range(n)]
    return advantages, returns


def random_case(seed: int, rows: int = 5, width: int = 150):
    """Rewards, values and units, rows of every length padded on either side with NaN."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [width, 1, 0, *torch.randint(2, width, (rows - 3,), generator=draw).tolist()]
    ids = torch.full((rows, width), -1)
    for row, length in enumerate(lengths):
        start = (width - length) * (row % 2)
        opens = (torch.rand(length, generator=draw) < 0.3).long()
        opens[:1] = 1
        ids[row, start : start + length] = opens.cumsum(0) - 1
    units = Segmentation(ids)
    rewards, values = (torch.randn(rows, width, generator=draw).masked_fill(ids < 0, NAN) for _ in range(2))
    return rewards, values, units


def test_golden_token_advantages():
    mask = torch.ones(1, 6, dtype=torch.bool)
    advantages, returns = generalized_advantages(REWARDS, VALUES, mask, gamma=1, lambda_=0.95)
    expected = torch.tensor([[0.911382, 0.959350, 1.325631, 1.184875, 1.352500, 0.950000]])
    assert_close(advantages, expected, atol=1e-6, rtol=0)
    assert_close(returns, expected + VALUES, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("mean", [1.124875, 1.5525, 0.95]),
        ("last", [1.169875, 1.6525, 0.95]),
        ("first", [1.079875, 1.4525, 0.95]),
        ("decayed", [1.139723, 1.588864, 0.95]),
    ],
)
def test_golden_macro_advantages(scheme, expected: list[float]):
    advantages, _ = macro_advantages(REWARDS, VALUES, UNITS, gamma=1, lambda_=0.95, value_scheme=scheme)
    assert_close(advantages, torch.tensor([expected])[:, [0, 0, 1, 1, 1, 2]], atol=1e-6, rtol=0)


def test_golden_one_macro_action():
    one = segment_by_response(torch.ones(1, 6, dtype=torch.bool))
    advantages, returns = macro_advantages(REWARDS, VALUES, one, gamma=1, lambda_=0.95)
    assert_close(advantages, torch.full((1, 6), 1.441667), atol=1e-6, rtol=0)
    assert_close(returns, torch.full((1, 6), 1.7), atol=1e-6, rtol=0)


def test_b04_advantages_stop_at_the_last_real_token():
    mask = torch.tensor([[True, True, True, False, False]])
    rewards, zeros = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]), torch.zeros(1, 5)
    advantages, _ = generalized_advantages(rewards, zeros, mask, gamma=1.0, lambda_=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    advantages, _ = generalized_advantages(rewards, zeros, mask, gamma=0.0, lambda_=1.0)
    assert advantages.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_b04_padding_rewards_do_not_leak_backwards():
    mask = torch.tensor([[True, True, False, False]])
    rewards = torch.tensor([[0.5, 2.0, 3.0, 3.0]])
    _, returns = generalized_advantages(rewards, torch.zeros(1, 4), mask, gamma=1.0, lambda_=1.0)
    assert returns.tolist() == [[2.5, 2.0, 0.0, 0.0]]


@pytest.mark.parametrize("seed", range(3))
def test_per_position_discounts_and_bootstrap_equal_a_loop(seed: int):
    rewards, values, units = random_case(seed)
    draw = torch.Generator().manual_seed(seed)
    gamma, lambda_ = (torch.rand(rewards.shape, generator=draw).masked_fill(~units.mask, NAN) for _ in range(2))
    bootstrap = torch.randn(len(rewards), generator=draw)
    advantages, returns = generalized_advantages(
        rewards, values, units.mask, gamma=gamma, lambda_=lambda_, bootstrap=bootstrap
    )
    for row, mask in enumerate(units.mask):
        columns = [x[row][mask].double().tolist() for x in (rewards, values, gamma, lambda_)]
        expected = torch.tensor(brute_gae(*columns, bootstrap=bootstrap[row].item()))
        assert_close(advantages[row][mask], expected, atol=2e-5, rtol=0)
        assert_close(returns[row][mask], expected + values[row][mask], atol=2e-5, rtol=0)
        assert not advantages[row][~mask].any() and not returns[row][~mask].any()


def test_a_hole_takes_no_part():
    mask = torch.tensor([[True, False, False, True, True]])
    holed = [torch.tensor([[a, NAN, NAN, b, c]]) for a, b, c in ((1.0, 2.0, 3.0), (0.5, -0.5, 0.2))]
    advantages, _ = generalized_advantages(*holed, mask, gamma=0.9, lambda_=0.8)
    expected = brute_gae([1.0, 2.0, 3.0], [0.5, -0.5, 0.2], [0.9] * 3, [0.8] * 3)
    assert_close(advantages, torch.tensor([[expected[0], 0, 0, expected[1], expected[2]]]))


@pytest.mark.parametrize("gamma_scale", ["unit", "token"])
@pytest.mark.parametrize("lambda_scale", ["unit", "token"])
@pytest.mark.parametrize("scheme", ["mean", "last", "first", "decayed"])
def test_batched_macro_advantages_equal_a_row_by_row_loop(scheme, gamma_scale, lambda_scale):
    """Different partitions in one batch, padded on either side with NaN: invariants 6 and 35."""
    rewards, values, units = random_case(7)
    options = {"value_scheme": scheme, "gamma_scale": gamma_scale, "lambda_scale": lambda_scale}
    advantages, returns = macro_advantages(rewards, values, units, gamma=0.98, lambda_=0.9, **options)
    for row, mask in enumerate(units.mask):
        lengths = [n for n in units.lengths[row].tolist() if n]
        r, v = (x[row][mask].double().tolist() for x in (rewards, values))
        expected = brute_macro(r, v, lengths, 0.98, 0.9, scheme, gamma_scale, lambda_scale)
        assert_close(advantages[row][mask], torch.tensor(expected[0]), atol=2e-5, rtol=0)
        assert_close(returns[row][mask], torch.tensor(expected[1]), atol=2e-5, rtol=0)
        assert not advantages[row][~mask].any() and not returns[row][~mask].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 20), st.floats(0, 1), st.floats(0, 1))
def test_macro_advantages_do_not_depend_on_width_or_side(lengths, extra, gamma, lambda_):
    tokens = sum(lengths)
    ids = torch.tensor([unit for unit, n in enumerate(lengths) for _ in range(n)])
    draw = torch.Generator().manual_seed(tokens)
    rewards, values = torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)
    plain = macro_advantages(rewards[None], values[None], Segmentation(ids[None]), gamma=gamma, lambda_=lambda_)
    for start in (0, extra):
        place = slice(start, start + tokens)
        wide = [torch.full((1, tokens + extra), fill) for fill in (NAN, NAN, -1)]
        for row, content in zip(wide, (rewards, values, ids), strict=True):
            row[0, place] = content
        moved = macro_advantages(*wide[:2], Segmentation(wide[2].long()), gamma=gamma, lambda_=lambda_)
        for a, b in zip(plain, moved, strict=True):
            assert_close(b[:, place], a, atol=1e-5, rtol=0)


def loss_and_gradients(ratio, advantages_of, units, rewards, values):
    """PPO's two losses at new = old + 0.1, and their gradients to log-probabilities and values."""
    draw = torch.Generator().manual_seed(3)
    old = -torch.rand(rewards.shape, generator=draw)
    logprobs, new_values = (old + 0.1).requires_grad_(), (values + 0.1).requires_grad_()
    advantages, returns = advantages_of()
    policy, _ = policy_loss(logprobs, old, advantages, units, ratio=ratio)
    value, _ = value_loss(new_values, values, returns, units.mask, clip=0.2)
    (policy + value).backward()
    return policy.detach(), value.detach(), logprobs.grad, new_values.grad, advantages, returns


@pytest.mark.parametrize("ratio", ["token", "joint", "geometric"])
@pytest.mark.parametrize("scheme", ["mean", "last", "first", "decayed"])
def test_ngram_of_1_is_token_ppo(ratio, scheme):
    """Invariant 25: advantages, returns, losses and gradients. The released code fails this."""
    rewards, values, units = random_case(11)
    rewards, values = rewards.nan_to_num(), values.nan_to_num()
    token = loss_and_gradients(
        "token",
        lambda: generalized_advantages(rewards, values, units.mask, gamma=0.99, lambda_=0.95),
        segment_by_token(units.mask),
        rewards,
        values,
    )
    ones = segment_by_ngram(units.mask, 1)
    macro = loss_and_gradients(
        ratio,
        lambda: macro_advantages(rewards, values, ones, gamma=0.99, lambda_=0.95, value_scheme=scheme),
        ones,
        rewards,
        values,
    )
    for a, b in zip(macro, token, strict=True):
        assert_close(a, b, atol=1e-6, rtol=0)


def test_ngram_of_none_is_one_step_and_with_a_group_baseline_rloo():
    """Invariant 26: A = Σ u − V; with V = 0 the whole response carries its score, and RLOO only centres it."""
    rewards, values, units = random_case(13)
    whole = segment_by_ngram(units.mask, None)
    advantages, _ = macro_advantages(rewards, values, whole, gamma=0.5, lambda_=0.5)
    for row, mask in enumerate(units.mask):
        if mask.any():
            expected = rewards[row][mask].sum() - values[row][mask].mean()
            assert_close(advantages[row][mask], expected.expand(int(mask.sum())), atol=1e-5, rtol=0)
    scores, _ = macro_advantages(
        REWARDS.expand(4, 6) * torch.arange(4)[:, None],
        torch.zeros(4, 6),
        segment_by_response(torch.ones(4, 6, dtype=torch.bool)),
        gamma=1,
        lambda_=1,
    )
    assert_close(leave_one_out(scores[:, 0], 4), 1.7 * torch.tensor([-2.0, -2 / 3, 2 / 3, 2.0]), atol=1e-6, rtol=0)


def test_even_and_last_interpolation_agree_when_partitions_coincide():
    """Invariant 27."""
    _, values, units = random_case(17)
    unit_rewards = torch.randn(units.unit_mask.shape)
    even, last = (spread_rewards(unit_rewards, units, how=how) for how in ("even", "last"))
    assert_close(sum_by_unit(even, units), sum_by_unit(last, units), atol=1e-5, rtol=0)
    for a, b in zip(*(macro_advantages(u, values, units, gamma=1, lambda_=0.95) for u in (even, last)), strict=True):
        assert_close(a, b, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["mean", "first"])
def test_gamma_and_lambda_of_1_give_rewards_to_go_less_value(scheme):
    """Invariant 28."""
    rewards, values, units = random_case(19)
    advantages, _ = macro_advantages(rewards, values, units, gamma=1, lambda_=1, value_scheme=scheme)
    unit_values = value_by_unit(values, units, scheme=scheme)
    tokens, _ = generalized_advantages(rewards, values, units.mask, gamma=1, lambda_=1)
    for row in range(len(rewards)):
        for unit in range(int(units.counts[row])):
            start, end = int(units.starts[row, unit]), int(units.mask[row].nonzero()[-1])
            to_go = rewards[row, start : end + 1].double().sum().float()
            assert_close(advantages[row, start], to_go - unit_values[row, unit], atol=5e-5, rtol=0)
            assert scheme != "first" or (advantages[row, start] - tokens[row, start]).abs() < 5e-5


def test_lambda_of_0_gives_the_one_step_error():
    advantages, _ = macro_advantages(REWARDS, VALUES, UNITS, gamma=0.9, lambda_=0)
    deltas = [-0.1 + 0.9 * 0.2 - 0.45, 0.8 + 0.9 * 0.05 - 0.2, 1.0 - 0.05]
    assert_close(advantages[0, [0, 2, 5]], torch.tensor(deltas), atol=1e-6, rtol=0)


def test_total_reward_does_not_depend_on_the_partition():
    """Invariants 24 and 29: KL and rewards add up to the same, over tokens or over units."""
    rewards, _, units = random_case(23)
    totals = rewards.nan_to_num().sum(1)
    coarse = Segmentation(torch.where(units.mask, units.ids // 3, -1))
    for partition in (units, coarse, segment_by_token(units.mask), segment_by_response(units.mask)):
        assert_close(sum_by_unit(rewards, partition).sum(1), totals, atol=1e-5, rtol=0)


def test_broadcast_advantage_is_constant_and_weighs_units_by_length():
    """Invariant 33."""
    rewards, values, units = random_case(29)
    advantages, _ = macro_advantages(rewards, values, units, gamma=1, lambda_=0.95)
    per_unit = advantages.gather(1, units.starts)
    for column in (units.ends, (units.starts + units.ends) // 2):
        assert torch.equal(advantages.gather(1, column)[units.unit_mask], per_unit[units.unit_mask])
    weighted = (per_unit * units.lengths).sum() / units.lengths.sum()
    assert_close(masked_mean(advantages, units.mask), weighted, atol=1e-5, rtol=0)


def test_whitened_advantages_do_not_depend_on_order_or_sharding():
    """Invariant 34."""
    rewards, values, units = random_case(31)

    def whitened(rows: torch.Tensor) -> torch.Tensor:
        chosen = units.select(rows)
        advantages, _ = macro_advantages(rewards[rows], values[rows], chosen, gamma=1, lambda_=0.95)
        return masked_whiten(advantages, chosen.mask)

    order = torch.tensor([3, 0, 4, 1, 2])
    together, reordered = whitened(torch.arange(5)), whitened(order)
    assert_close(reordered, together[order], atol=1e-5, rtol=0)
    real = together[units.mask]
    assert abs(real.mean()) < 1e-5 and abs(real.std(correction=0) - 1) < 1e-5


def test_nan_in_padding_reaches_no_gradient():
    rewards, values, units = random_case(37)
    grads = []
    for fill in (NAN, 0.0):
        x = [y.nan_to_num(fill).requires_grad_() for y in (rewards, values)]
        options = {"gamma_scale": "token", "lambda_scale": "token"}
        advantages, returns = macro_advantages(*x, units, gamma=0.99, lambda_=0.95, **options)
        (advantages.square().sum() + returns.sum()).backward()
        grads.append([y.grad for y in x])
    for dirty, clean in zip(*grads, strict=True):
        assert torch.equal(dirty, clean) and not dirty[~units.mask].any()


def test_computes_in_float32_under_bfloat16_autocast_and_keeps_float64():
    rewards, values, units = random_case(41)
    plain, _ = macro_advantages(rewards, values, units, gamma=1, lambda_=0.95)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = macro_advantages(rewards, values, units, gamma=1, lambda_=0.95)
    assert inside.dtype == torch.float32 and torch.equal(inside, plain)
    exact, _ = macro_advantages(rewards.double(), values.double(), units, gamma=1, lambda_=0.95)
    assert exact.dtype == torch.float64
    assert_close(plain, exact.float(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("width", [0, 1, 2, 63, 64, 65, 1000])
def test_any_width_equals_a_loop(width: int):
    rewards, values = torch.randn(2, width), torch.randn(2, width)
    mask = torch.ones(2, width, dtype=torch.bool)
    advantages, _ = generalized_advantages(rewards, values, mask, gamma=0.999, lambda_=0.99)
    for row in range(2):
        columns = [x[row].double().tolist() for x in (rewards, values)]
        expected = torch.tensor(brute_gae(*columns, [0.999] * width, [0.99] * width))
        assert_close(advantages[row], expected, atol=5e-5, rtol=1e-5)


def test_leave_one_out_by_hand():
    scores = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])
    assert leave_one_out(scores, 3).tolist() == [-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="group_size 1 must be at least 2"):
        leave_one_out(scores, 1)
    with pytest.raises(ValueError, match="6 scores do not divide into groups of 4"):
        leave_one_out(scores, 4)


def test_group_baselines_leave_out_what_is_masked():
    scores, mask = torch.tensor([1.0, math.nan, 4.0, 2.0, 5.0, math.inf]), torch.tensor([1, 0, 1, 1, 1, 0]).bool()
    # Groups of three: (1, 4) and (2, 5).
    assert leave_one_out(scores, 3, mask=mask).tolist() == [-3.0, 0.0, 3.0, -3.0, 3.0, 0.0]
    mean, spread = group_moments(scores, 3, mask=mask)
    assert mean.tolist() == [2.5] * 3 + [3.5] * 3 and spread.tolist() == [1.5] * 6
    alone = leave_one_out(torch.tensor([3.0, 9.0]), 2, mask=torch.tensor([True, False]))
    assert alone.tolist() == [0.0, 0.0]


def test_macro_bootstrap_continues_a_row_that_was_cut_off():
    """Two actions (2 tokens, 1 token), γ = 0.9 a token: A₁ = r + γ V_after − V, A₀ = R + γ² V₁ − V₀ + γ² λ A₁."""
    actions = Segmentation(torch.tensor([[0, 0, 1]]))
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    advantages, _ = macro_advantages(
        rewards, values, actions, gamma=0.9, lambda_=0.5, value_scheme="first", gamma_scale="token",
        bootstrap=torch.tensor([10.0]),
    )  # fmt: skip
    last = 3.0 + 0.9 * 10 - 0.25
    first = 1.0 + 0.9 * 2 + 0.81 * 0.25 - 0.5 + 0.81 * 0.5 * last
    assert advantages[0].tolist() == pytest.approx([first, first, last], rel=1e-6)
