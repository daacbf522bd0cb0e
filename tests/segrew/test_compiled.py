"""Every core function is one graph: `torch.compile(fullgraph=True)` breaks on whatever waits for the device.

Run in a process of its own, without the shape checks that the test suite wraps around each function.
"""

import subprocess
import sys

import pytest
import torch

from segrew import advantages, aggregation, macro_actions, masking, segmentation, token_statistics, unit_rules

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True] * 12, [False] * 4 + [True] * 8, [True] * 5 + [False] * 7, [False] * 12])
    return {
        "mask": mask,
        "ended": torch.tensor([True, False, True, False]),
        "x": torch.randn(4, 12, generator=draw),
        "y": torch.randn(4, 12, generator=draw),
        "hidden": torch.randn(10, 6, generator=draw),
        "weight": torch.randn(20, 6, generator=draw),
        "targets": torch.randint(20, (10,), generator=draw),
        "draws": torch.rand(3, 4, 3, generator=draw),
    }


@case
def rules(mask, ended, x, y, draws, **_):
    units = [
        segmentation.segment_by_entropy(x, mask, threshold=0.3),
        segmentation.segment_by_token(mask),
        segmentation.segment_by_response(mask),
        segmentation.segment_by_ngram(mask, 3),
        segmentation.segment_by_ngram(mask, mask.sum(1)),
        segmentation.segment_by_ngram(mask, None),
        segmentation.segment_by_perplexity(x, mask),
        segmentation.segment_by_boundaries(x > 0, mask),
        # torch.compile takes no generator, so the random rule is compiled from its draws on.
        unit_rules._segment_by_deal(torch.tensor([1, 2, 5]), draws, mask),
        segmentation.segment(segmentation.SegmentationConfig(threshold=0.3), mask, entropy=x, ended=ended),
    ]
    return [segmentation.join_stop(u, ended).ids for u in units]


@case
def record(mask, ended, x, **_):
    u = segmentation.segment_by_entropy(x, mask, threshold=0.3)
    columns = [segmentation.read_columns(u, ended, position) for position in ("end", "content")]
    # Summed over units, whose number is the exact count in eager mode and a bound in the graph.
    over_units = [field.sum(1) for field in (u.unit_mask, u.starts, u.ends, u.lengths, u.locations, *columns)]
    return [u.mask, u.counts, u.positions, u.unit_lengths, *over_units]


@case
def units(mask, x, y, **_):
    u = segmentation.segment_by_entropy(x.detach(), mask, threshold=0.3)
    values = [macro_actions.value_by_unit(y, u, scheme=s) for s in ("mean", "last", "decayed", "first")]
    return [macro_actions.spread_to_tokens(v, u) for v in (*values, macro_actions.sum_by_unit(y, u))]


@case
def aggregators(mask, x, y, **_):
    kinds = ("mean", "sum", "softmax", "softmin", "log_mean_exp", "softmax_weighted", "max", "min", "last", "learned")
    return [aggregation.aggregate(x, mask, kind=kind, temperature=0.7, weights=y) for kind in kinds]


@case
def recursions(mask, x, y, **_):
    u = segmentation.segment_by_entropy(x.detach(), mask, threshold=0.3)
    token = advantages.generalized_advantages(x, y, mask, gamma=0.9, lambda_=0.8, bootstrap=x[:, 0])
    varying = advantages.generalized_advantages(x, y, mask, gamma=y.sigmoid(), lambda_=x.sigmoid())
    macro = advantages.macro_advantages(x, y, u, gamma=0.9, lambda_=0.8)
    scaled = advantages.macro_advantages(
        x, y, u, gamma=0.9, lambda_=0.8, value_scheme="decayed", gamma_scale="token", lambda_scale="token"
    )
    return [*token, *varying, *macro, *scaled, advantages.leave_one_out(x[:, 0], 2)]


@case
def statistics(hidden, weight, targets, **_):
    frozen = token_statistics.token_statistics(hidden, weight.detach(), targets, chunk_size=4, softcap=3.0)
    learning = token_statistics.token_statistics(hidden, weight, targets, chunk_size=4, temperature=0.7)
    return [*frozen, *learning]


@case
def masks(mask, x, **_):
    return [masking.masked_mean(x, mask), masking.masked_whiten(x, mask)]


def evaluate(function) -> list[torch.Tensor]:
    """Outputs, then gradients to whatever float inputs they depend on."""
    arguments = {k: v.requires_grad_(v.is_floating_point() and k != "draws") for k, v in inputs().items()}
    outputs = function(**arguments)
    loss = sum((o.square().sum() for o in outputs if o.requires_grad), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    return [*(o.detach() for o in outputs), *(v.grad for v in arguments.values() if v.grad is not None)]


def main() -> None:
    for name, function in CASES.items():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for ours, eager in zip(evaluate(compiled), evaluate(function), strict=True):
            torch.testing.assert_close(ours, eager, msg=name)
        print(name)


@pytest.mark.slow
def test_compiles_to_one_graph_with_equal_values_and_gradients():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == list(CASES)


if __name__ == "__main__":
    main()
