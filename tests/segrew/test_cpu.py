"""oneDNN's products are those of torch, gradients included, and taken only where they are faster; memory is kept."""

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from segrew import cpu
from segrew.cpu import OneDNNLinear, fit_to_cpu, onednn_is_faster, times_transposed
from segrew.language_models import load_causal_lm


@pytest.fixture
def anywhere(monkeypatch):
    """As on a processor where it is faster, for products of every size."""
    try:
        cpu._onednn(torch.eye(2), torch.eye(2), None)
    except (AttributeError, RuntimeError):
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(cpu, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(cpu, "LEAST_PRODUCTS", 1)


def counted(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN is given."""
    shapes: list[tuple[int, ...]] = []
    product = cpu._onednn
    monkeypatch.setattr(cpu, "_onednn", lambda x, *rest: (shapes.append(tuple(x.shape)), product(x, *rest))[1])
    return shapes


@pytest.mark.parametrize("shape", [(7, 24), (1, 7, 24), (2, 3, 5, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_what_a_plain_one_gives(anywhere, monkeypatch, shape, bias):
    torch.manual_seed(0)
    plain, fast = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
    fast.load_state_dict(plain.state_dict())
    fit_to_cpu(fast)
    shapes = counted(monkeypatch)
    read, results = torch.randn(shape), []
    for layer in (plain, fast):
        x = read.clone().requires_grad_()
        layer(x).square().sum().backward()
        results.append([layer(x), x.grad, *[weight.grad for weight in layer.parameters()]])
    assert type(fast) is OneDNNLinear and len(shapes) == 4  # two passes forward, one back to inputs and weights
    for ours, torchs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


def test_only_gradients_that_are_wanted_are_computed(anywhere, monkeypatch):
    layer = nn.Linear(8, 8).requires_grad_(False)
    fit_to_cpu(layer)
    x = torch.randn(3, 8, requires_grad=True)
    shapes = counted(monkeypatch)
    layer(x).sum().backward()
    assert shapes == [(3, 8), (3, 8)] and layer.weight.grad is None


def test_a_vector_goes_the_usual_way_and_a_second_derivative_is_refused(anywhere, monkeypatch):
    layer = nn.Linear(8, 8)
    fit_to_cpu(layer)
    shapes = counted(monkeypatch)
    layer(torch.randn(8)).sum().backward()
    assert shapes == []
    x = torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_go_the_usual_way(anywhere, monkeypatch, dtype):
    shapes = counted(monkeypatch)
    layer = nn.Linear(8, 8, dtype=dtype)
    fit_to_cpu(layer)
    assert layer(torch.randn(3, 8, dtype=dtype)).dtype == dtype
    fast = nn.Linear(8, 8)
    fit_to_cpu(fast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(torch.randn(3, 8)).dtype == torch.bfloat16
    assert shapes == []


def test_small_products_go_the_usual_way(anywhere, monkeypatch):
    monkeypatch.setattr(cpu, "LEAST_PRODUCTS", 3 * 8 * 5)
    shapes = counted(monkeypatch)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(times_transposed(x, weight), x @ weight.T)
    torch.testing.assert_close(times_transposed(x[:2], weight), x[:2] @ weight.T)
    torch.testing.assert_close(times_transposed(x.T, weight.T[:3].T), x.T @ weight.T[:3])
    assert shapes == [(3, 8), (8, 3)]


def test_no_layer_changes_where_it_is_not_faster(monkeypatch):
    monkeypatch.setattr(cpu, "onednn_is_faster", lambda: False)
    layer = nn.Linear(8, 8)
    fit_to_cpu(layer)
    assert type(layer) is nn.Linear


def test_a_machine_with_an_accelerator_keeps_torchs_layers(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not onednn_is_faster.__wrapped__()


def test_a_torch_that_has_the_operator_otherwise_keeps_its_layers(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu.Path, "read_text", lambda self: "AuthenticAMD")

    def gone(*args):
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu, "_onednn", gone)
    assert not onednn_is_faster.__wrapped__()


def test_a_loaded_model_scores_and_is_adapted_alike(anywhere, monkeypatch, tiny_dir):
    from peft import LoraConfig, get_peft_model

    ids = torch.randint(5, 60, (2, 9))
    fast = load_causal_lm(str(tiny_dir), dtype=torch.float32)
    assert any(type(module) is OneDNNLinear for module in fast.modules())
    monkeypatch.setattr(cpu, "onednn_is_faster", lambda: False)
    plain = load_causal_lm(str(tiny_dir), dtype=torch.float32)
    assert not any(type(module) is OneDNNLinear for module in plain.modules())
    monkeypatch.setattr(cpu, "onednn_is_faster", lambda: True)
    torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert list(fast.state_dict()) == list(plain.state_dict())
    adapted = get_peft_model(fast, LoraConfig(r=4, target_modules="all-linear"))
    adapted(ids).logits.sum().backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)


FAULTS = """
import resource, sys, torch
from segrew.cpu import keep_freed_memory
assert sys.argv[1] == "plain" or keep_freed_memory()
def fill():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((2**24,), 1.0)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum([fill() for _ in range(40)][-10:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="models run elsewhere")
def test_freed_memory_serves_the_next_tensor():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True, text=True).stdout)
        for how in ("plain", "kept")
    }
    assert faults["kept"] < faults["plain"] / 4, faults  # after a few it has blocks that fit
