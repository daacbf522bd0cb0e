"""`segrew doctor`: check a model, a reward model and this machine before a run, by the functions that runs use."""

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from policy import doctor_files as files
from policy import doctor_machine as machine
from policy import doctor_numbers as numbers
from policy import doctor_rewards as rewards
from policy import doctor_text as text
from policy.doctor_subject import DoctorConfig, Finding, Skip, Status, Subject
from reward_models.checkpoints import quiet
from segrew.config import parse
from segrew.language_models import best_device
from segrew.run_directory import versions

# By group and name; a check reads the parts of the subject that its parameters name. Those that load come first.
CHECKS: dict[str, dict[str, Callable[..., Finding]]] = {
    "files": {
        "language model": files.model_loads,
        "reward model": files.reward_model_loads,
        "weights": files.finite_weights,
        "chat template": text.chat_template,
        "vocabulary": files.vocabulary,
        "same tokens": files.same_tokens,
        "context": files.context,
        "reward model's length": files.training_length,
        "stop tokens": files.stop_settings,
        "sampling settings": files.sampling_settings,
    },
    "text and tokens": {
        "BOS": text.begin_token,
        "stop token": text.stop_token,
        "pad token": text.pad_token,
        "date": text.date,
        "system role": text.system_role,
        "prompt and answer": text.border,
        "round trip": text.round_trip,
    },
    "numbers": {
        "batch 1 and N": numbers.batch_size,
        "padding side": numbers.padding_side,
        "packed and padded": numbers.packed_rows,
        "bfloat16": numbers.bfloat16,
        "float16": numbers.float16,
        "decoding": numbers.decoding,
        "KL at step 0": numbers.first_kl,
    },
    "rewards": {
        "segmenter": rewards.segmenter,
        "scores, batch 1 and N": rewards.score_batches,
        "head": rewards.trained_head,
        "stock reading": rewards.stock_reading,
        "normalizer": rewards.normalizer,
        "normalizer's range": rewards.normalizer_range,
    },
    "this machine": {
        "processors": machine.processors,
        "bfloat16 units": machine.bfloat16_units,
        "CUDA device": machine.cuda_device,
        "attention": machine.attention,
        "memory": machine.memory,
        "sandbox for programs": machine.sandbox,
        "parser (extra)": machine.parser,
    },
}
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "fault": "bold red", "skipped": "dim"}
# Not ours to tell of; torch's decorators stand between a function of ours that warns and its caller.
_LIBRARIES = re.compile(r"/site-packages/(?!torch/utils/_contextlib|jaxtyping/|beartype/)")


@dataclass(frozen=True)
class Result(Finding):
    """A finding with the check it is of."""

    group: str = ""
    name: str = ""


def diagnose(subject: Subject, check: Callable[..., Finding]) -> Finding:
    """Run a check. What the functions that runs share refuse is a fault, and what they warn of a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = subject.call(check)
        except Skip as reason:
            found = Finding("skipped", str(reason))
        except (ValueError, OSError) as error:
            found = Finding("fault", "refused", None, " ".join(str(error).split()))
    said = [str(w.message) for w in caught if w.category is UserWarning and not _LIBRARIES.search(w.filename)]
    if said and found.status == "ok":
        found = Finding("warning", found.measured, found.value, " ".join(dict.fromkeys(said)))
    return found


def examine(subject: Subject) -> Iterator[Result]:
    """Run every check."""
    for group, checks in CHECKS.items():
        for name, check in checks.items():
            yield Result(**asdict(diagnose(subject, check)), group=group, name=name)


def worst(results: list[Result]) -> Status:
    """The worst status of all."""
    order: tuple[Status, ...] = ("fault", "warning", "ok")
    return next((status for status in order if any(r.status == status for r in results)), "skipped")


def table_of(results: list[Result]) -> Table:
    """The findings as a table: what to do below what was measured, and what was skipped for one reason together."""
    table = Table("check", "status", "measured, and what to do", box=SIMPLE_HEAD, pad_edge=False)
    made = [result for result in results if result.status != "skipped"]
    for group, rows in groupby(made, key=lambda result: result.group):
        table.add_row(Text(group, style="bold"))
        for row in rows:
            said = Text(row.measured)
            if row.remedy:
                said.append(f"\n→ {row.remedy}", style=STYLES[row.status])
            table.add_row(f"  {row.name}", Text(row.status, style=STYLES[row.status]), said)
        table.add_section()
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.status == "skipped":
            reasons.setdefault(result.measured, []).append(result.name)
    for reason, names in reasons.items():
        table.add_row(Text("skipped", style="dim"), "", Text(f"{reason}: {', '.join(names)}", style="dim"))
    return table


def record_of(config: DoctorConfig, results: list[Result]) -> dict[str, Any]:
    """The findings as plain data, numbers that JSON does not know as None."""
    rows = [{"name": result.name, "group": result.group} | asdict(result) for result in results]
    for row in rows:
        if isinstance(row["value"], float) and not math.isfinite(row["value"]):
            row["value"] = None
    return {
        "status": worst(results),
        "counts": dict(Counter(result.status for result in results)),
        "settings": asdict(config),
        "device": str(best_device()),
        "cores": os.cpu_count(),
        "versions": versions(),
        "checks": rows,
    }


def main(argv: list[str]) -> int:
    """Run `segrew doctor`; 1 where there is a fault."""
    (config,) = parse("doctor", (DoctorConfig,), argv)
    results: list[Result] = []
    with quiet(), Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("Examining", total=sum(map(len, CHECKS.values())))
        for result in examine(Subject(config)):
            results.append(result)
            progress.update(bar, advance=1, description=f"Examined {result.name}")
    if config.json:
        print(json.dumps(record_of(config, results), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        console, counts = Console(), Counter(result.status for result in results)
        console.print(table_of(results))
        console.print(", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status]), highlight=False)
    return int(worst(results) == "fault")
