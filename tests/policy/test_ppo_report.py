"""What a step reports."""

import warnings
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from policy.ppo_report import explained_variance, report
from policy.ppo_run import Run
from policy.run_state import RunState


def test_explained_variance_of_perfect_useless_and_constant_predictions():
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    assert explained_variance(returns, returns, mask).item() == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 4), 7.0), returns, mask).item() == pytest.approx(0.0, abs=1e-6)
    # Var(G − V) with V = −G is 4 Var(G).
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(1, 4), mask).item() == 0.0


class _Stub(SimpleNamespace):
    """A run of which only the report is of interest."""

    def __init__(self):
        nothing = SimpleNamespace(append=lambda *_: None)
        accelerator = SimpleNamespace(is_main_process=True, log=lambda *_, **__: None)
        config = SimpleNamespace(num_samples_per_prompt=1)
        super().__init__(directory=nothing, accelerator=accelerator, state=RunState(0.05), warned=set(), config=config)

    warn_once = Run.warn_once


def test_b26_a_lasting_negative_kl_is_warned_of_once(monkeypatch):
    """B26 c: below −0.1 twice running gives one warning; once, or with a break, gives none."""
    untyped = getattr(report, "__wrapped__", report)
    run = cast(Run, _Stub())
    counts = []
    for step, kl in enumerate([-0.2, 0.0, -0.2, -0.05, -0.2, -0.3, -0.4], 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            untyped(run, {"step": step, "kl/k1": kl, "reward/flat_prompts": 0.0})
        counts.append(len(caught))
    assert counts == [0, 0, 0, 0, 0, 1, 0]
