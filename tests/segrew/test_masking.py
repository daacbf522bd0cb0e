import pytest
import torch

from segrew.masking import fill_padding, masked_mean, masked_whiten

NAN = float("nan")


def test_b22_no_real_value_gives_zeros():
    whitened = masked_whiten(torch.tensor([[3.0, NAN]]), torch.zeros(1, 2, dtype=torch.bool))
    assert whitened.tolist() == [[0.0, 0.0]]


def test_b22_single_value_comes_back_unscaled():
    whitened = masked_whiten(torch.tensor([[5.0, NAN]]), torch.tensor([[True, False]]))
    assert whitened.tolist() == [[5.0, 0.0]]


@pytest.mark.parametrize("value", [0.1, 5.0, -12345.678, 1e-20])
def test_b22_equal_values_give_zeros(value: float):
    x = torch.full((7, 9), value)
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[:, 5:] = False
    assert masked_whiten(x, mask).count_nonzero() == 0


def test_b22_population_variance():
    x = torch.tensor([[1.0, 2.0, NAN], [4.0, 3.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    expected = torch.tensor([[-1.341641, -0.447214, 0.0], [1.341641, 0.447214, 0.0]])
    torch.testing.assert_close(masked_whiten(x, mask), expected, atol=1e-6, rtol=0)


def test_whitened_values_have_mean_0_and_std_1_whatever_the_padding():
    torch.manual_seed(0)
    values = torch.randn(50) * 3 + 100
    narrow = masked_whiten(values.view(5, 10), torch.ones(5, 10, dtype=torch.bool))
    mask = torch.rand(4, 40) < 0.5
    mask.view(-1)[mask.view(-1).nonzero()[50:, 0]] = False
    wide = masked_whiten(torch.full((4, 40), NAN).masked_scatter(mask, values), mask)
    torch.testing.assert_close(wide[mask], narrow.view(-1), atol=1e-5, rtol=0)
    assert abs(wide[mask].mean()) < 1e-6 and abs(wide[mask].std(correction=0) - 1) < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e25, 1e37])
def test_whitening_holds_at_any_scale(scale):
    """Against numpy in float64, where no such square overflows or vanishes."""
    x = torch.tensor([[1.0, -2.0, NAN, 3.5], [0.25, 7.0, NAN, -9.0]]) * scale
    whitened = masked_whiten(x, ~x.isnan())
    real = x[~x.isnan()].double().numpy()
    expected = torch.tensor((real - real.mean()) / real.std()).float()
    torch.testing.assert_close(whitened[~x.isnan()], expected, atol=1e-5, rtol=0)
    assert whitened[x.isnan()].count_nonzero() == 0


def test_masked_mean_ignores_padding_and_computes_in_float32():
    x = torch.tensor([1.0, NAN, 3.5]).bfloat16()
    mean = masked_mean(x, torch.tensor([True, False, True]))
    assert mean == 2.25 and mean.dtype == torch.float32
    assert masked_mean(x, torch.zeros(3, dtype=torch.bool)) == 0


@pytest.mark.parametrize("reduce", [masked_mean, lambda x, mask: masked_whiten(x, mask).square().sum()])
def test_gradient_stays_finite_and_zero_in_padding(reduce):
    x = torch.tensor([1.0, NAN, 3.5, float("inf")], requires_grad=True)
    reduce(x, torch.tensor([True, False, True, False])).backward()
    assert x.grad.isfinite().all() and x.grad[1] == x.grad[3] == 0


def test_fill_padding_takes_any_type():
    filled = fill_padding(torch.tensor([3, 4]), torch.tensor([True, False]), -1.0)
    assert filled.tolist() == [3.0, -1.0] and filled.dtype == torch.float32


def test_float64_stays_float64():
    assert masked_whiten(torch.ones(2, dtype=torch.float64), torch.ones(2).bool()).dtype == torch.float64
