import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from segrew.token_statistics import token_statistics

N, V, D = 37, 101, 8


def example(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=draw, dtype=torch.float64) * scale
    weight = torch.randn(V, D, generator=draw, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=draw)
    return hidden.to(dtype), weight.to(dtype), targets


def plain(hidden, weight, targets, bias=None, softcap=None, logit_scale=1.0, temperature=1.0, entropy_temperature=1.0):
    """The same from whole logits, in float64, with torch's own softmax and autograd."""
    logits = hidden.double() @ weight.double().T
    logits = (logits if bias is None else logits + bias.double()) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=logits / entropy_temperature).entropy()
    return logprobs, entropy.detach()


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "entropy_temperature": 1.3},
    {"softcap": 3.0},
    {"logit_scale": 0.25, "temperature": 2},
    {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.8, "entropy_temperature": 0.6},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("head_learns", [False, True])
def test_values_and_gradients_equal_the_plain_form(settings: dict, with_bias: bool, head_learns: bool):
    hidden, weight, targets = example()
    hidden.requires_grad_()
    weight.requires_grad_(head_learns)
    bias = torch.linspace(-1, 1, V).requires_grad_(head_learns) if with_bias else None
    leaves = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(9))
    results = []
    for form, chunk in ((plain, {}), (token_statistics, {"chunk_size": 10})):
        logprobs, entropy = form(hidden, weight, targets, bias=bias, **settings, **chunk)
        gradients = torch.autograd.grad((logprobs * upstream).sum(), leaves)
        results.append([logprobs.detach().double(), entropy.double(), *gradients])
    for ours, expected in zip(*reversed(results), strict=True):
        assert_close(ours, expected.to(ours), atol=2e-5, rtol=1e-5)


def test_chunks_change_nothing():
    """Invariant 7."""
    hidden, weight, targets = example()
    whole = token_statistics(hidden, weight, targets, chunk_size=N)
    for size in (1, 7, 36, 100, None):
        for a, b in zip(token_statistics(hidden, weight, targets, chunk_size=size), whole, strict=True):
            assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_uniform_and_certain_distributions():
    """Invariant 7."""
    targets = torch.arange(5)
    logprobs, entropy = token_statistics(torch.zeros(5, D), torch.randn(V, D), targets)
    assert_close(entropy, torch.full((5,), math.log(V)))
    assert_close(logprobs, torch.full((5,), -math.log(V)))
    logprobs, entropy = token_statistics(torch.eye(5) * 1e4, torch.eye(5), targets)
    assert not logprobs.any() and not entropy.any()


def test_adding_a_constant_to_all_logits_changes_nothing():
    """Invariant 7."""
    hidden, weight, targets = example()
    shifted = token_statistics(hidden, weight, targets, bias=torch.full((V,), 300.0))
    for a, b in zip(shifted, token_statistics(hidden, weight, targets), strict=True):
        assert_close(a, b, atol=2e-4, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "entropy_temperature": 2.0}])
def test_impossible_tokens_give_no_nan(settings: dict):
    """Invariant 7."""
    hidden, weight, targets = example()
    possible = targets.unique()
    bias = torch.full((V,), -torch.inf)
    bias[possible] = 0.0
    place = torch.full((V,), -1)
    place[possible] = torch.arange(len(possible))
    hidden.requires_grad_()
    logprobs, entropy = token_statistics(hidden, weight, targets, bias=bias, **settings)
    expected = plain(hidden, weight[possible], place[targets], **settings)
    assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-5)
    assert_close(entropy.double(), expected[1], atol=1e-5, rtol=1e-5)
    (ours,) = torch.autograd.grad(logprobs.sum(), hidden)
    (theirs,) = torch.autograd.grad(expected[0].sum(), hidden)
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_bfloat16_inputs_and_autocast_lose_nothing_beyond_the_inputs():
    hidden, weight, targets = example(dtype=torch.bfloat16, scale=2.0)
    hidden.requires_grad_()
    expected = plain(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = token_statistics(hidden, weight, targets)
        logprobs.sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16
    assert_close(logprobs.double(), expected[0], atol=1e-4, rtol=0)
    assert_close(entropy.double(), expected[1], atol=1e-4, rtol=0)


def test_head_that_learns_under_autocast_gets_full_gradients():
    hidden, weight, targets = example()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        token_statistics(hidden, weight, targets)[0].sum().backward()
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets)[0].sum(), weight)
    assert_close(weight.grad, expected, atol=2e-5, rtol=1e-5)


def test_entropy_is_detached_and_float64_stays():
    hidden, weight, targets = example(dtype=torch.float64)
    hidden.requires_grad_()
    logprobs, entropy = token_statistics(hidden, weight, targets)
    assert logprobs.requires_grad and not entropy.requires_grad
    assert logprobs.dtype == entropy.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda h: token_statistics(h, weight, targets, chunk_size=9)[0], hidden)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("head_learns", [False, True])
def test_never_holds_all_logits(head_learns: bool):
    hidden, weight, targets = example()
    hidden.requires_grad_()
    weight.requires_grad_(head_learns)
    with LargestTensor() as largest:
        token_statistics(hidden, weight, targets, chunk_size=5)[0].sum().backward()
    assert largest.size == max(5 * V, V * D)


def test_no_tokens_at_all():
    logprobs, entropy = token_statistics(torch.zeros(0, D), torch.randn(V, D), torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("name", ["temperature", "entropy_temperature"])
def test_temperatures_must_be_positive(name: str):
    with pytest.raises(ValueError, match=f"{name} 0"):
        token_statistics(*example(), **{name: 0.0})
