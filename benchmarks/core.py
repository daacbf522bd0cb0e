"""Speed and memory of the core beside plain forms, in one run.

    python benchmarks/core.py            # everything; the whole logits of the plain form need 17 GiB of memory
    python benchmarks/core.py --quick    # a smaller vocabulary and batch, a minute in all

Prints a table and writes it to --output as JSON. Both sides of a line run on the same inputs in the same process
(token statistics: each form in a process of its own, whose peak memory is measured) and are checked to be equal.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policy.losses import policy_loss, value_loss
from policy.reward_shaping import spread_rewards
from reward_models.normalizers import LocationNormalizer
from segrew.advantages import macro_advantages
from segrew.segmentation import segment_by_entropy, segment_by_ngram
from segrew.token_statistics import token_statistics

UNIT, GAMMA, LAMBDA, CLIP, THRESHOLD = 5, 1.0, 0.95, 0.2, 1.75
PHI = (0.7668, 0.2569, 0.4705, 2.8339)  # published normalizer of Phi-3-mini: w_mu, w_sigma, b_mu, b_sigma


def seconds(function: Callable[[], Any], repeats: int) -> float:
    """Median wall time after one call to warm up; both sides of a line are measured this way."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# -- macro advantages and losses ---------------------------------------------------------------------------------


def ppo_inputs(rows: int, width: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    names = ("rewards", "values", "old_logprobs", "logprobs", "new_values")
    x = {name: 0.2 * torch.randn(rows, width, generator=draw) for name in names}
    x["logprobs"] += x["old_logprobs"]
    x["new_values"] += x["values"]
    lengths = torch.randint(width // 2, width + 1, (rows,), generator=draw)
    return {**x, "mask": torch.arange(width) < lengths[:, None]}


def ppo_vectorised(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    units = segment_by_ngram(x["mask"], UNIT)
    advantages, returns = macro_advantages(x["rewards"], x["values"], units, gamma=GAMMA, lambda_=LAMBDA)
    logprobs, values = x["logprobs"].clone().requires_grad_(), x["new_values"].clone().requires_grad_()
    policy, _ = policy_loss(logprobs, x["old_logprobs"], advantages, units, clip=CLIP)
    value, _ = value_loss(values, x["values"], returns, x["mask"], clip=CLIP)
    (policy + value).backward()
    assert logprobs.grad is not None and values.grad is not None
    return policy.detach(), value.detach(), logprobs.grad, values.grad


def ppo_loop(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Row by row and unit by unit, as one would first write it down."""
    logprobs, values = x["logprobs"].clone().requires_grad_(), x["new_values"].clone().requires_grad_()
    policy, value, tokens = torch.zeros(()), torch.zeros(()), 0
    for row in range(len(logprobs)):
        length = int(x["mask"][row].sum())
        spans = [slice(start, min(start + UNIT, length)) for start in range(0, length, UNIT)]
        following, next_value, row_policy, row_value = (torch.zeros(()) for _ in range(4))
        for span in reversed(spans):
            unit_value = x["values"][row, span].mean()
            delta = x["rewards"][row, span].sum() + GAMMA * next_value - unit_value
            following = delta + GAMMA * LAMBDA * following
            next_value = unit_value
            ratio = (logprobs[row, span] - x["old_logprobs"][row, span]).exp()
            surrogate = torch.min(ratio * following, ratio.clamp(1 - CLIP, 1 + CLIP) * following)
            row_policy = row_policy - surrogate.sum()
            new, old, target = values[row, span], x["values"][row, span], following + unit_value
            clipped = old + (new - old).clamp(-CLIP, CLIP)
            row_value = row_value + 0.5 * torch.max((new - target).square(), (clipped - target).square()).sum()
        policy, value, tokens = policy + row_policy, value + row_value, tokens + length
    ((policy + value) / tokens).backward()
    assert logprobs.grad is not None and values.grad is not None
    return policy.detach() / tokens, value.detach() / tokens, logprobs.grad, values.grad


def macro_line(rows: int, width: int) -> dict[str, Any]:
    x = ppo_inputs(rows, width)
    ours, plain = seconds(lambda: ppo_vectorised(x), 31), seconds(lambda: ppo_loop(x), 3)
    gap = max(float((a - b).abs().max()) for a, b in zip(ppo_vectorised(x), ppo_loop(x), strict=True))
    return line(f"macro advantages + losses, fwd + bwd, {rows}x{width}", plain, ours, 300, gap)


def growth_line(widths: tuple[int, ...], rows: int = 16) -> dict[str, Any]:
    times = {}
    for width in widths:
        x = ppo_inputs(rows, width)
        times[width] = seconds(lambda x=x: ppo_vectorised(x), 15)
    short, long = min(widths), max(widths)
    growth = (times[long] / times[short]) / (long / short)
    return {
        "name": f"growth of the same in t, {rows} rows, {short} → {long}",
        "milliseconds": {width: round(1e3 * t, 2) for width, t in times.items()},
        "time_ratio_over_length_ratio": round(growth, 3),
        "target": "≤ 1.3",
        "met": growth <= 1.3,
    }


# -- segment, normalize, spread ------------------------------------------------------------------------------------


def dense_vectorised(entropy: Tensor, readings: Tensor, mask: Tensor, normalizer: LocationNormalizer) -> Tensor:
    units = segment_by_entropy(entropy, mask, threshold=THRESHOLD)
    rewards = normalizer.transform(readings.gather(1, units.ends), units.locations)
    return spread_rewards(rewards, units, how="even")


def dense_loop(entropy: Tensor, readings: Tensor, mask: Tensor, normalizer: LocationNormalizer) -> Tensor:
    """Row by row and token by token on tensors, as in the released code of 2501.02790."""
    rewards = torch.zeros_like(readings)
    for row in range(len(entropy)):
        length = int(mask[row].sum())
        ends = [j for j in range(length - 1) if entropy[row, j + 1] > THRESHOLD] + [length - 1]
        start = 0
        for k, end in enumerate(ends):
            location = (k + 1) / len(ends)
            reward = (readings[row, end] - normalizer.mean(location)) / normalizer.std(location)
            for j in range(start, end + 1):
                rewards[row, j] = reward / (end + 1 - start)
            start = end + 1
    return rewards


def dense_line(rows: int, width: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(rows, width, generator=draw) * 2.2  # one token in five is above the threshold
    readings, mask = torch.randn(rows, width, generator=draw), ppo_inputs(rows, width)["mask"]
    x = (entropy, readings, mask, LocationNormalizer.from_parameters(*PHI))
    ours, plain = seconds(lambda: dense_vectorised(*x), 31), seconds(lambda: dense_loop(*x), 3)
    gap = float((dense_vectorised(*x) - dense_loop(*x)).abs().max())
    return line(f"segment + normalize + spread, {rows}x{width}", plain, ours, 500, gap)


def line(name: str, plain: float, ours: float, target: int, gap: float) -> dict[str, Any]:
    return {
        "name": name,
        "plain_ms": round(1e3 * plain, 1),
        "ours_ms": round(1e3 * ours, 3),
        "speedup": round(plain / ours, 1),
        "largest_difference": gap,
        "target": f"≥ {target}x, equal to 1e-5",
        "met": plain / ours >= target and gap <= 1e-5,
    }


# -- token statistics ------------------------------------------------------------------------------------------------


def statistics_plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def measure_statistics(form: str, gradient: bool, tokens: int, vocabulary: int, width: int, path: str) -> None:
    """Run one form in this fresh process; print time and peak memory over the inputs, save what it computed."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_(gradient)
    weight = torch.randn(vocabulary, width, generator=draw).mul_(width**-0.5)
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    function = {"plain": statistics_plain, "chunked": token_statistics}[form]
    function(hidden[:2], weight, targets[:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    logprobs, entropy = function(hidden, weight, targets)
    if gradient:
        logprobs.sum().backward()
    elapsed = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    torch.save([x.detach() for x in (logprobs, entropy, hidden.grad) if x is not None], path)
    mebibyte = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss counts bytes there, KiB elsewhere
    print(json.dumps({"seconds": elapsed, "mebibytes": peak / mebibyte}))


def statistics_line(gradient: bool, tokens: int, vocabulary: int, width: int, repeats: int) -> dict[str, Any]:
    best: dict[str, dict[str, float]] = {}
    saved = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in ("chunked", "plain") * repeats:
            path = f"{folder}/{form}.pt"
            sizes = [str(x) for x in (int(gradient), tokens, vocabulary, width)]
            command = [sys.executable, __file__, "--measure", form, *sizes, path]
            done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if form not in best or done["seconds"] < best[form]["seconds"]:
                best[form] = done
            saved[form] = torch.load(path)
    plain, ours = best["plain"], best["chunked"]
    memory, speedup = plain["mebibytes"] / ours["mebibytes"], plain["seconds"] / ours["seconds"]
    target = 12 if gradient else 20
    return {
        "name": f"token statistics{' + gradient to hidden' if gradient else ''}, {tokens}x{vocabulary}x{width}",
        "plain_ms": round(1e3 * plain["seconds"]),
        "ours_ms": round(1e3 * ours["seconds"]),
        "speedup": round(speedup, 2),
        "plain_mib": round(plain["mebibytes"]),
        "ours_mib": round(ours["mebibytes"]),
        "memory_ratio": round(memory, 1),
        "largest_difference": max(
            float((a - b).abs().max()) for a, b in zip(saved["plain"], saved["chunked"], strict=True)
        ),
        "target": f"memory ≥ {target}x less, no slower",
        "met": memory >= target and speedup >= 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes; targets are for the full ones")
    parser.add_argument("--output", default="benchmarks/core.json")
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        form, gradient, tokens, vocabulary, width, path = arguments.measure
        return measure_statistics(form, gradient == "1", int(tokens), int(vocabulary), int(width), path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors; threads only add stalls. The processes below use all of them.
    rows, width = (16, 256) if arguments.quick else (64, 1024)
    sizes = (2048, 32000, 576, 1) if arguments.quick else (8192, 128256, 576, 2)
    lines = []
    for make in (
        lambda: macro_line(rows, width),
        lambda: growth_line((256, 1024) if arguments.quick else (512, 2048, 8192)),
        lambda: dense_line(rows, width),
        lambda: statistics_line(False, *sizes),
        lambda: statistics_line(True, *sizes),
    ):
        lines.append(make())
        print(json.dumps(lines[-1], ensure_ascii=False), flush=True)
    record = {
        "machine": platform.processor() or platform.machine(),
        "threads": threads,
        "torch": torch.__version__,
        "quick": arguments.quick,
        "lines": lines,
    }
    Path(arguments.output).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{sum(entry['met'] for entry in lines)} of {len(lines)} targets met; written to {arguments.output}")


if __name__ == "__main__":
    main()
