"""Where rewards land: field reports B04, B28, B29 and the invariants of interpolation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy.reward_shaping import dense_rewards, shape_rewards, spread_rewards
from segrew.macro_actions import sum_by_unit
from segrew.segmentation import Segmentation, segment_by_response, segment_by_token


def bools(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def ids_from_lengths(rows: list[list[int]], start: int = 0, extra: int = 0) -> torch.Tensor:
    """Unit ids from unit lengths, by a plain loop."""
    width = start + max(sum(row) for row in rows) + extra
    ids = torch.full((len(rows), width), -1)
    for i, row in enumerate(rows):
        column = start
        for k, length in enumerate(row):
            for _ in range(length):
                ids[i, column] = k
                column += 1
    return ids


UNIT_LENGTHS = st.lists(st.lists(st.integers(1, 6), max_size=5), min_size=1, max_size=4)


@given(UNIT_LENGTHS, st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 99))
def test_spreading_keeps_or_multiplies_the_sum(lengths, start, extra, wider, seed):
    """Invariant 22, and 23 for padding; `s` may be any size that holds the largest count."""
    segmentation = Segmentation(ids_from_lengths(lengths, start, extra))
    units = max(1, max(len(row) for row in lengths)) + wider
    rewards = torch.randn(len(lengths), units, generator=torch.Generator().manual_seed(seed))
    spread = {how: spread_rewards(rewards, segmentation, how=how) for how in ("even", "last", "repeat")}
    for i, row in enumerate(lengths):
        column = start
        for k, length in enumerate(row):
            r, columns = rewards[i, k].item(), slice(column, column + length)
            assert spread["even"][i, columns].tolist() == pytest.approx([r / length] * length, abs=1e-6)
            assert spread["last"][i, columns].tolist() == pytest.approx([0.0] * (length - 1) + [r], abs=1e-6)
            assert spread["repeat"][i, columns].tolist() == pytest.approx([r] * length, abs=1e-6)
            column += length
    for tokens in spread.values():
        assert not tokens[~segmentation.mask].any()


def test_b29_placement_of_segment_rewards():
    segmentation = Segmentation(torch.tensor([[0, 0, 1, 1, 2, -1, -1, -1]]))
    rewards = torch.tensor([[0.2, -0.1, 0.5]])
    last = spread_rewards(rewards, segmentation, how="last")
    even = spread_rewards(rewards, segmentation, how="even")
    torch.testing.assert_close(last, torch.tensor([[0, 0.2, 0, -0.1, 0.5, 0, 0, 0]]))
    torch.testing.assert_close(even, torch.tensor([[0.1, 0.1, -0.05, -0.05, 0.5, 0, 0, 0]]))
    assert last.sum().item() == pytest.approx(0.6) and even.sum().item() == pytest.approx(0.6)


def test_b29_one_token_is_the_same_dense_and_bandit():
    mask = bools([1, 0, 0])
    for segmentation in (segment_by_token(mask), segment_by_response(mask)):
        for how in ("even", "last", "repeat"):
            assert spread_rewards(torch.tensor([[2.0]]), segmentation, how=how).tolist() == [[2.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "mask, expected",
    [
        ([1, 1, 1, 0, 0], [0, 0, 1, 0, 0]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 1]),
        ([1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        ([0, 0, 1, 1, 0], [0, 0, 0, 1, 0]),
    ],
)
def test_b04_terminal_reward_sits_on_the_last_real_token(mask, expected):
    mask = bools(mask)
    rewards = spread_rewards(torch.tensor([[1.0]]), segment_by_response(mask), how="last")
    assert rewards.tolist() == [[float(x) for x in expected]]
    assert (rewards * mask).sum().item() == 1.0


def test_more_units_or_tokens_need_not_pay_more():
    """Two units of 1 and 3 tokens beside one unit of 2."""
    units = Segmentation(torch.tensor([[0, 1, 1, 1], [0, 0, -1, -1]]))
    rewards = torch.tensor([[9.0, 3.0], [4.0, 0.0]])
    for scale, totals in (("none", [12.0, 4.0]), ("unit", [6.0, 4.0]), ("token", [3.0, 2.0])):
        dense = dense_rewards(rewards, units, scale=scale)
        torch.testing.assert_close(dense.sum(1), torch.tensor(totals))
        assert dense[1, 2:].count_nonzero() == 0
    empty = Segmentation(torch.full((1, 3), -1))
    assert dense_rewards(torch.zeros(1, 1), empty, scale="token").count_nonzero() == 0


def test_b28_missing_eos_penalty_is_paid_once_on_the_last_token():
    """B28: r1 ended at its stop token, r2 was cut off, r3 ended at a custom one, r4 is a stop token only."""
    mask = bools([1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0])
    ended = torch.tensor([True, False, True, True])
    tokens = segment_by_token(mask)
    terminal = dense_rewards(torch.ones(4, 1), segment_by_response(mask), how="last")
    rewards = shape_rewards(terminal, torch.zeros(4, 5), tokens, ended, kl_coef=0.0, missing_eos_penalty=1.0)
    assert rewards.sum(dim=1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert rewards[1].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    dense = dense_rewards(torch.ones(4, 5), tokens)
    rewards = shape_rewards(dense, torch.zeros(4, 5), tokens, ended, kl_coef=0.0, missing_eos_penalty=1.0)
    assert rewards[1].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_rewards_are_clamped_before_they_are_split():
    segmentation = Segmentation(torch.tensor([[0, 0, 0, 0, 1]]))
    rewards = dense_rewards(torch.tensor([[40.0, -30.0]]), segmentation, clip=10.0)
    assert rewards.tolist() == [[2.5, 2.5, 2.5, 2.5, -10.0]]


def test_kl_is_subtracted_per_token():
    """Invariant 24: u_j = r_j − β k1_j; β = 0 leaves the interpolated reward; unit sums keep the total."""
    segmentation = Segmentation(torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1]]))
    ended = torch.tensor([True, True])
    dense = dense_rewards(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), segmentation)
    kl = torch.tensor([[0.1, -0.2, 0.3, float("nan")], [0.0, 1.0, 2.0, 3.0]])
    shaped = shape_rewards(dense, kl, segmentation, ended, kl_coef=0.5)
    expected = torch.tensor([[0.5 - 0.05, 0.5 + 0.1, 2.0 - 0.15, 0.0], [3.0, -1 / 3 - 0.5, -1 / 3 - 1, -1 / 3 - 1.5]])
    torch.testing.assert_close(shaped, expected)
    torch.testing.assert_close(sum_by_unit(shaped, segmentation).sum(1), expected.sum(1))
    plain = shape_rewards(dense, torch.zeros(2, 4), segmentation, ended, kl_coef=0.5)
    torch.testing.assert_close(plain, dense)


def test_a_unit_may_pay_for_its_mean_kl():
    """kl_scale unit: 0.1 and 0.3 in one action cost β · 0.2 together, a single token costs all of its own."""
    actions = Segmentation(torch.tensor([[0, 0, 1]]))
    kl = torch.tensor([[0.1, 0.3, 0.5]])
    shaped = shape_rewards(torch.zeros(1, 3), kl, actions, torch.tensor([True]), kl_coef=2.0, kl_scale="unit")
    torch.testing.assert_close(shaped, torch.tensor([[-0.1, -0.3, -1.0]]))
    torch.testing.assert_close(sum_by_unit(shaped, actions), torch.tensor([[-2 * 0.2, -2 * 0.5]]))


def test_rows_without_actions_are_paid_nothing():
    actions = Segmentation(torch.tensor([[0, 0, 1], [-1, -1, -1]]))
    shaped = shape_rewards(
        torch.ones(2, 3), torch.ones(2, 3), actions, torch.tensor([True, False]), kl_coef=1.0, missing_eos_penalty=1.0
    )
    assert shaped.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_shares_are_taken_in_float32_whatever_comes_in():
    shares = spread_rewards(torch.ones(1, 1, dtype=torch.bfloat16), Segmentation(torch.zeros(1, 7, dtype=torch.int64)))
    assert shares.dtype == torch.float32 and shares.sum().item() == pytest.approx(1.0, abs=1e-6)
