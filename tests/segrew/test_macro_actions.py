import pytest
import torch
from jaxtyping import TypeCheckError

from segrew.macro_actions import spread_to_tokens, sum_by_unit, value_by_unit
from segrew.segmentation import Segmentation

NAN = float("nan")
SCHEMES = ("mean", "last", "decayed", "first")
# Units [0,1][2,3,4][5] of method section 3, right-padded, and one unit of one token, left-padded.
UNITS = Segmentation(torch.tensor([[0, 0, 1, 1, 1, 2, -1], [-1, -1, -1, -1, -1, -1, 0]]))
REWARDS = torch.tensor([[0.1, -0.2, 0.3, 0.0, 0.5, 1.0, NAN], [NAN] * 6 + [7.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1, 0.05, NAN], [NAN] * 6 + [3.0]])


def random_units(rows: int = 6, width: int = 23, seed: int = 0) -> Segmentation:
    """Units drawn by plain loops, rows of every length, padded on either side."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.full((rows, width), -1)
    for row in range(rows):
        length = int(torch.randint(0 if row else width, width + 1, (), generator=draw))
        start = (width - length) * (row % 2)
        unit = 0
        for column in range(start, start + length):
            if column > start and torch.rand((), generator=draw) < 0.4:
                unit += 1
            ids[row, column] = unit
    return Segmentation(ids)


def test_golden_macro_rewards():
    expected = torch.tensor([[-0.1, 0.8, 1.0], [7.0, 0.0, 0.0]])
    torch.testing.assert_close(sum_by_unit(REWARDS, UNITS), expected)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("mean", [0.45, 0.2, 0.05]),
        ("last", [0.4, 0.1, 0.05]),
        ("first", [0.5, 0.3, 0.05]),
        ("decayed", [0.433333, 0.163636, 0.05]),
    ],
)
def test_golden_macro_values(scheme, expected: list[float]):
    values = value_by_unit(VALUES, UNITS, scheme=scheme)
    torch.testing.assert_close(values, torch.tensor([expected, [3.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_a_weighted_mean(scheme):
    """Invariant 30."""
    units = random_units()
    constant = value_by_unit(torch.full(units.ids.shape, 2.5), units, scheme=scheme)
    torch.testing.assert_close(constant, 2.5 * units.unit_mask)


def test_decayed_weights_grow_toward_the_last_token():
    """Invariant 30."""
    units = Segmentation(torch.zeros(1, 4, dtype=torch.int64))
    weights = torch.stack([value_by_unit(row[None], units, scheme="decayed")[0, 0] for row in torch.eye(4)])
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    torch.testing.assert_close(weights * harmonic, torch.tensor([1 / 4, 1 / 3, 1 / 2, 1.0]))


def test_units_of_one_token_make_every_scheme_the_identity():
    """Invariant 30."""
    units = Segmentation(torch.arange(5)[None])
    x = torch.randn(1, 5)
    for scheme in SCHEMES:
        assert torch.equal(value_by_unit(x, units, scheme=scheme), x)
    assert torch.equal(sum_by_unit(x, units), x) and torch.equal(spread_to_tokens(x, units), x)


def test_sum_and_spread_equal_a_loop():
    units, draw = random_units(), torch.Generator().manual_seed(1)
    x, y = torch.randn(units.ids.shape, generator=draw), torch.randn(6, units.size, generator=draw)
    sums, spread = torch.zeros_like(y), torch.zeros_like(x)
    for row in range(6):
        for column in range(units.ids.shape[1]):
            unit = units.ids[row, column]
            if unit >= 0:
                sums[row, unit] += x[row, column]
                spread[row, column] = y[row, unit]
    torch.testing.assert_close(sum_by_unit(x, units), sums)
    assert torch.equal(spread_to_tokens(y, units), spread)


@pytest.mark.parametrize("seed", range(3))
def test_merging_units_keeps_the_total(seed: int):
    units = random_units(seed=seed)
    merged = Segmentation(torch.where(units.mask, units.ids // 2, -1))
    x = torch.randn(units.ids.shape)
    total = (x * units.mask).sum(1)
    torch.testing.assert_close(sum_by_unit(x, units).sum(1), total, atol=1e-5, rtol=0)
    torch.testing.assert_close(sum_by_unit(x, merged).sum(1), total, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_in_padding_reaches_neither_value_nor_gradient(scheme):
    clean = torch.randn(UNITS.ids.shape)
    dirty = clean.masked_fill(~UNITS.mask, NAN).requires_grad_()
    clean.requires_grad_()
    for x in (clean, dirty):
        (value_by_unit(x, UNITS, scheme=scheme).square().sum() + sum_by_unit(x, UNITS).square().sum()).backward()
    torch.testing.assert_close(dirty.grad, clean.grad * UNITS.mask)


def test_nan_in_padding_units_does_not_spread():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]], requires_grad=True)
    spread = spread_to_tokens(x, UNITS)
    spread.sum().backward()
    assert spread.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 0.0], [0.0] * 6 + [4.0]]
    assert x.grad.tolist() == [[2.0, 3.0, 1.0], [1.0, 0.0, 0.0]]


def test_integers_are_summed_and_spread_too():
    assert spread_to_tokens(UNITS.lengths, UNITS).tolist()[0] == [2, 2, 3, 3, 3, 1, 0]
    assert sum_by_unit(torch.ones(2, 7, dtype=torch.int64), UNITS).tolist() == [[2, 3, 1], [1, 0, 0]]


def test_bfloat16_is_summed_in_float32():
    units = Segmentation(torch.zeros(1, 400, dtype=torch.int64))
    total = sum_by_unit(torch.full((1, 400), 1.0078125).bfloat16(), units)
    assert total.dtype == torch.float32 and total.item() == 403.125


def test_unknown_scheme_is_named():
    with pytest.raises((ValueError, TypeCheckError), match="median"):
        value_by_unit(VALUES, UNITS, scheme="median")
