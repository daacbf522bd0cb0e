"""How a PPO step grows with the length of answers and with their number: CPU time and memory, with fitted exponents.

    python benchmarks/growth.py            # lengths 64 to 1,024 at 8 answers; 8 to 64 answers of 64 tokens
    python benchmarks/growth.py --quick

The model is tiny, so that what is ours is not lost beside it. Answers are random tokens of one length, not sampled:
sampling is the model's own. The yardstick is a bare forward and backward pass of the stock model over the same rows; no
part of a step may grow with a larger exponent. Times are medians of CPU time, one thread. Writes --output as JSON.
"""

import argparse
import contextlib
import functools
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import clock, forget_peak, give_back, machine, memory_mib, timed
from ppo_fixture import models, settings
from rich.console import Console
from rich.table import Table

from policy import ppo, scoring
from policy.ppo_run import open_run
from policy.rollout import Answers
from segrew.conversations import Conversations
from segrew.language_models import load_causal_lm, trunk_of

ROWS, SLACK = 8, 0.15  # rows of a pass; an exponent fitted on a few points is no better known than this
PARTS = ("logprobs", "values", "segment", "score", "advantages", "update")


def answers_of(length: int, model: Any, chat: Any, prompts: list[list[int]], *_: Any, **__: Any) -> Answers:
    """Random answers in place of sampled ones, without stop tokens."""
    draw = torch.Generator().manual_seed(len(prompts) * length)
    ids = torch.randint(3, len(chat.tokenizer), (len(prompts), length), generator=draw).tolist()
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    return Answers(Conversations(prompts, ids, ended), [chat.decode(row) for row in ids], [None] * len(ids))


def bare_pass(model: Any, rows: list[list[int]]) -> None:
    """Forward and backward of the stock trunk, padded, a few rows at a time."""
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        width = max(map(len, part))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in part])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part])
        trunk_of(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.sum().backward()


def measured(function: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds, and MiB of memory at the peak over what was held before."""
    give_back()
    forget_peak()
    before, begin = memory_mib("VmRSS"), time.process_time()
    function()
    return time.process_time() - begin, float(max(memory_mib() - before, 1))


@contextlib.contextmanager
def clock_part(run: Any, seconds: dict[str, float], name: str) -> Iterator[None]:
    """In place of the run's own clock, which counts wall time only."""
    with clock(seconds, name):
        yield
    run.seconds[name] = seconds[name]


def measure(batch: int, length: int, model: str, reward_model: str, repeats: int) -> dict[str, float]:
    """Seconds and memory of one step and its parts, and of the bare pass."""
    with tempfile.TemporaryDirectory() as output:
        config = settings(
            model, reward_model, f"{output}/run", rollout_batch_size=batch, max_new_tokens=length, bf16=False,
            per_device_train_batch_size=ROWS, max_tokens_per_batch=ROWS * (length + 64), max_prompts=64,
            max_prompt_length=64, samples_per_step=0,
        )  # fmt: skip
        run, _ = open_run(config)
        seconds: dict[str, float] = {}
        ppo.sample_answers = functools.partial(answers_of, length)
        timed(seconds, "cuts", scoring, "segment")
        run.clock = functools.partial(clock_part, run, seconds)  # type: ignore[method-assign]
        yardstick = load_causal_lm(model, dtype=torch.float32).train()
        found: dict[str, list[float]] = {}
        for turn in range(repeats + 1):
            seconds.clear()
            whole, memory = measured(lambda turn=turn: ppo.train_step(run, turn + 1))
            answers = answers_of(
                length, None, run.roles.chat, [run.prompt_ids[i] for i in ppo.positions_of(run, turn + 1)]
            )
            rows = [p + r for p, r in zip(answers.conversations.prompts, answers.conversations.responses, strict=True)]
            bare, bare_memory = measured(lambda rows=rows: bare_pass(yardstick, rows))
            spent = {part: seconds[f"{part}_cpu"] for part in PARTS}
            spent |= {
                "cuts and advantages": seconds["cuts_cpu"] + seconds["advantages_cpu"],
                "step": whole,
                "bare": bare,
            }
            for name, value in (spent | {"step, MiB": memory, "bare, MiB": bare_memory}).items():
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values[1:]) for name, values in found.items()}  # the first one warms up


def exponent(sizes: list[int], values: list[float]) -> float:
    """Slope of log value over log size, least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return round(statistics.linear_regression(x, y).slope, 2)


def line(name: str, sizes: list[int], found: list[dict[str, float]]) -> dict[str, Any]:
    """Exponents over all sizes, and over the upper half of them, where constant costs weigh less."""
    late = len(sizes) // 2
    fitted = {
        part: {"all": exponent(sizes, values), "upper_half": exponent(sizes[late:], values[late:])}
        for part in found[0]
        for values in [[one[part] for one in found]]
    }
    worse = [
        part
        for part in fitted
        if fitted[part]["upper_half"] > fitted["bare, MiB" if "MiB" in part else "bare"]["upper_half"] + SLACK
    ]
    return {
        "name": name,
        "sizes": sizes,
        "values": {part: [round(one[part], 4) for one in found] for part in found[0]},
        "exponents": fitted,
        "grow_faster_than_the_bare_pass": worse,
        "target": f"no exponent of the upper half more than {SLACK} above the bare pass's",
        "met": not worse,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three small sizes, two repeats")
    parser.add_argument("--output", default="benchmarks/growth.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.lengths, arguments.batches, arguments.repeats = [16, 32, 64], [8, 16, 32], 2
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(reward head|drift).*")
    lines, short = [], arguments.lengths[0]
    with models(quick=True) as (model, reward_model):
        for directory in (model, reward_model):  # random weights know no longest text
            config = Path(directory) / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
        for name, sizes, shapes in (
            (f"length, {ROWS} answers", arguments.lengths, [(ROWS, length) for length in arguments.lengths]),
            (f"answers, {short} tokens", arguments.batches, [(batch, short) for batch in arguments.batches]),
        ):
            found = []
            for shape in shapes:
                found.append(measure(*shape, model, reward_model, arguments.repeats))
                print(shape, json.dumps({part: round(value, 4) for part, value in found[-1].items()}), flush=True)
            lines.append(line(name, sizes, found))
    record = {"machine": machine(1), "torch": torch.__version__, "quick": arguments.quick, "lines": lines}
    Path(arguments.output).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for entry in lines:
        table = Table(entry["name"], *map(str, entry["sizes"]), "exponent", "upper half")
        for part, values in entry["values"].items():
            fits = entry["exponents"][part]
            table.add_row(part, *(f"{value:.3g}" for value in values), str(fits["all"]), str(fits["upper_half"]))
        Console(width=120).print(table)
        print(f"grow faster than the bare pass: {', '.join(entry['grow_faster_than_the_bare_pass']) or 'none'}")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
