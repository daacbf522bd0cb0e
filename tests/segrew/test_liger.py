"""Liger's kernels go into layers below the heads, with the names and forms of liger-kernel 0.8, and nowhere else."""

import importlib.machinery
import sys
import types
from types import MethodType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from segrew.liger import apply_liger_kernel, check_liger_kernel


@pytest.fixture
def stand_in(monkeypatch):
    """As in liger-kernel 0.8: norms of a Llama get another forward, a loss of its own replaces the model's forward."""
    calls = []

    def norm(self, states):
        variance = states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (states.float() * torch.rsqrt(variance + self.variance_epsilon)).to(states.dtype)

    def apply(model, cross_entropy=False, fused_linear_cross_entropy=True, rope=True, rms_norm=True, swiglu=True):
        calls.append((type(model).__name__, {"rms_norm": rms_norm}))
        if model.config.model_type != "llama":
            return
        if cross_entropy or fused_linear_cross_entropy:
            model.forward = MethodType(lambda self, **_: "a language model's loss", model)
        for module in getattr(model, model.base_model_prefix, model).modules():
            if rms_norm and type(module).__name__ == "LlamaRMSNorm":
                module.__dict__["forward"] = MethodType(norm, module)

    package, module = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    package.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    module._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    return calls


def tiny(kind=LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **changes
    )
    return kind(config).eval()


def patched(model) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def test_it_is_refused_without_cuda_and_without_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--use_liger_kernel true: its kernels run on CUDA"):
        check_liger_kernel()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=r"not installed. pip install 'segrew\[liger\]'"):
        check_liger_kernel()


def test_with_both_it_passes(monkeypatch, stand_in):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_liger_kernel()


def test_layers_get_kernels_and_heads_keep_their_forward(stand_in):
    policy, reward = tiny(), tiny(LlamaForSequenceClassification, num_labels=1, pad_token_id=0)
    ids = torch.tensor([[3, 4, 5, 6]])
    before = policy(ids).logits, reward(ids).logits
    apply_liger_kernel(policy, None, reward)
    assert [name for name, _ in stand_in] == ["LlamaModel", "LlamaModel"]
    assert patched(policy) == patched(reward) == 5 and not {"forward"} & (vars(policy).keys() | vars(reward).keys())
    for model, expected in zip((policy, reward), before, strict=True):
        torch.testing.assert_close(model(ids).logits, expected)


def test_adapters_above_and_copies_of_the_layers_keep_them(stand_in):
    import copy

    from peft import LoraConfig, get_peft_model

    model = tiny()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    apply_liger_kernel(adapted)
    twin = copy.deepcopy(adapted)
    own = {id(module) for module in twin.modules()}
    assert patched(twin) == 5
    assert all(id(vars(m)["forward"].__self__) in own for m in twin.modules() if "forward" in vars(m))


def test_one_may_choose_among_them_and_a_model_without_any_is_named(stand_in):
    with pytest.warns(UserWarning, match="no kernels for models of type llama"):
        apply_liger_kernel(tiny(), kernels={"rms_norm": False, "cross_entropy": True})
    assert stand_in[-1][1] == {"rms_norm": False}
