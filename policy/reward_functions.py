"""Reward functions: any callable f(prompts, completions, **columns), read as rewards of answers, units or tokens."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policy.code_rewards import CodeExecution, code_rewards
from policy.readings import Answered, Reading, Units
from policy.reward_shaping import Interpolation
from segrew.chat import ChatFormat
from segrew.prompts import Prompt
from segrew.segmentation import Segmentation, segment_by_response, segment_by_token

OWN_COLUMNS = ("prompts", "completions", "segments", "completion_ids")


def load_function(name: str, execution: CodeExecution | None = None) -> Callable[..., Any]:
    """Import `module:function`; modules of the working directory are found too. `code` runs programs.

    Args:
        execution: the permission to run programs, and their limits.

    Raises:
        ValueError: there is no such module or function.
    """
    if name == "code":
        return partial(code_rewards, execution=execution)
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"--reward_functions {name}: expected module:function, such as my_rewards:brevity.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--reward_functions {name}: {error}.") from None
    if not callable(found):
        raise ValueError(f"--reward_functions {name}: is a {type(found).__name__}, not a function.")
    return found


@dataclass(frozen=True)
class FunctionReward:
    """A callable as a source of reward.

    It gets `prompts` (a list of messages each) and `completions` (texts), and of what follows whatever it names or
    takes as **: the data's other columns, one value an answer; `segments`, the texts of each answer's reward units;
    `completion_ids`. It returns one entry an answer: a number (paid at the answer's end), one number a segment
    (spread like a reward model's), or one number a token. None or NaN says that there is no reward.

    Args:
        name: module:function.
    """

    name: str
    function: Callable[..., Any]
    chat: ChatFormat
    normalizer: None = None

    @torch.no_grad()
    def read(self, answered: Answered, units: Units) -> Reading:
        """Call the function on a batch of answers.

        Raises:
            ValueError: the number of entries, or the length of one, fits neither the answers, units nor tokens.
        """
        count = len(answered.texts)
        columns = self._columns(answered, units.readings)
        try:
            entries = self.function(
                prompts=[prompt.messages for prompt in answered.prompts], completions=answered.texts, **columns
            )
        except Exception as error:
            raise ValueError(
                f"{self.name} raised {type(error).__name__}: {error} (SEGREW_TRACEBACK=1 shows where); nothing was "
                "updated."
            ) from error
        if entries is None or not hasattr(entries, "__iter__"):
            raise ValueError(
                f"{self.name} returned {type(entries).__name__}; return a list with one entry for each answer."
            )
        entries = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in entries]
        if len(entries) != count:
            raise ValueError(f"{self.name} returned {len(entries)} entries for {count} answers; return one for each.")
        segmentation, how, rows = self._as_rewards(entries, units.readings)
        rewards = torch.zeros(count, segmentation.size)
        for i, row in enumerate(rows):
            rewards[i, : len(row)] = torch.tensor([_number(value) for value in row])
        rewards = rewards.to(segmentation.ids.device)
        return Reading(self.name, segmentation, rewards, rewards, rewards.sum(1), how)

    def require_columns(self, prompts: Sequence[Prompt]) -> None:
        """Refuse data that lack a column which the function cannot do without.

        Raises:
            ValueError: naming it, and those that there are.
        """
        there = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
        taken = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [p.name for p in self._parameters if p.default is p.empty and p.kind in taken]
        missing = [name for name in needed if name not in (*OWN_COLUMNS, *there)]
        if missing:
            raise ValueError(
                f"{self.name} needs the column '{missing[0]}', which the data lack (there are: "
                f"{', '.join(there) or 'none besides the prompt'}); add it, or give the parameter a default."
            )

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())

    def _columns(self, answered: Answered, units: Segmentation) -> dict[str, Any]:
        names = list(dict.fromkeys(name for prompt in answered.prompts for name in prompt.columns))
        taken = [name for name in names if name in OWN_COLUMNS]
        if taken:
            raise ValueError(f"the data has a column '{taken[0]}', a name that reward functions get from the run.")
        everything = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        wanted = {p.name for p in self._parameters}
        columns: dict[str, Any] = {}
        for name in names:
            if everything or name in wanted:
                columns[name] = [prompt.columns.get(name) for prompt in answered.prompts]
        if everything or "segments" in wanted:
            columns["segments"] = answered.segments(self.chat, units)
        if everything or "completion_ids" in wanted:
            columns["completion_ids"] = answered.conversations.responses
        return columns

    def _as_rewards(self, entries: list, units: Segmentation) -> tuple[Segmentation, Interpolation | None, list[list]]:
        """Say which units the entries are of, and how their rewards spread (None: as the run says)."""
        if all(value is None or isinstance(value, Real) for value in entries):
            return segment_by_response(units.mask), "last", [[value] for value in entries]
        odd = [v for v in entries if isinstance(v, Real | str) or not (v is None or hasattr(v, "__iter__"))]
        if odd:
            raise ValueError(
                f"{self.name} returned {odd[0]!r:.60} among its entries; return a number for each answer, or a list of "
                "numbers for each."
            )
        rows = [[None] if value is None else list(value) for value in entries]
        given = [i for i, value in enumerate(entries) if value is not None]
        tokens = segment_by_token(units.mask)
        kinds: tuple[tuple[Segmentation, Interpolation | None], ...] = ((units, None), (tokens, "last"))
        for segmentation, how in kinds:
            counts = segmentation.counts.tolist()
            if all(len(rows[i]) == counts[i] for i in given):
                return segmentation, how, rows
        row = next(i for i in given if len(rows[i]) != units.counts[i])
        raise ValueError(
            f"{self.name} returned {len(rows[row])} values for answer {row}, which has {int(units.counts[row])} "
            f"segments and {int(tokens.counts[row])} tokens; return a number, or one value a segment or a token for "
            "every answer."
        )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
