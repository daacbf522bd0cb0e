"""What a check of gpu_check.py comes to; each runs on its own, whatever became of the others."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Outcome:
    """Whether a check holds, what it says, and its numbers."""

    ok: bool
    says: str
    numbers: dict[str, Any] = field(default_factory=dict)


def outcome_of(check: Callable[[], Outcome], device: torch.device) -> dict[str, Any]:
    """Run a check; a failing one is what its error says and where."""
    begin = time.perf_counter()
    try:
        outcome = check()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error of a kernel belongs to the check that launched it
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        outcome = Outcome(False, f"{last} ({place.filename}:{place.lineno})")
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        except RuntimeError as error:  # the device is lost: the checks after this one will say so too
            outcome = Outcome(False, f"{outcome.says}; {error}")
    return {"ok": outcome.ok, "says": outcome.says, "seconds": time.perf_counter() - begin, **outcome.numbers}
