"""Rewards for programs: what running them on the tests of their problem says (2410.02743, its APPS experiments).

    −1.0  the program does not compile
    −0.6  no test gave anything to compare: it crashed or broke a limit in each
    −0.3 + 1.3 · passed / total  otherwise, so +1.0 where all pass

A test that crashed beside others that ended counts as not passed.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from policy.code_promises import trusted_launcher
from policy.code_sandbox import Limits, run_program
from policy.code_tests import ProgramTests, extract_program
from segrew.config import arg

Status = Literal["passed", "failed", "runtime_error", "compile_error", "timeout", "memory", "output"]
COLUMNS = ("tests", "input_output")


@dataclass(frozen=True)
class CodeReward:
    """What became of a program.

    Args:
        value: the reward, from −1 to 1.
        status: passed or failed where a test could be compared, else why none could: what the first one met.
        passed, total: tests.
        detail: the first error, and in which test (counted from 1).
    """

    value: float
    status: Status
    passed: int
    total: int
    detail: str = ""


@dataclass
class CodeExecution:
    """Settings of running the programs that a policy writes; nothing is run without `allow_code_execution`."""

    allow_code_execution: bool = arg(False, help="Run programs that the policy writes, each in a sandbox of its own.")
    code_timeout: float = arg(4.0, help="Seconds for each test of a program.")
    code_memory_mb: int = arg(512, help="Address space of a program's processes, in MiB each.")
    code_output_bytes: int = arg(2**20, help="Longest output of a program, for each test.")
    code_workers: int | None = arg(None, help="Programs that run at once; default one for each processor.")

    def __post_init__(self) -> None:
        for name in ("code_timeout", "code_memory_mb", "code_output_bytes", "code_workers"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} {value}: must be positive.")

    @property
    def limits(self) -> Limits:
        """The limits of each program."""
        return Limits(self.code_timeout, self.code_memory_mb, self.code_output_bytes)

    @property
    def workers(self) -> int:
        """Programs that run at once."""
        return self.code_workers or len(os.sched_getaffinity(0))


def apps_reward(
    program: str,
    tests: dict[str, Any] | str,
    *,
    timeout: int | float = 4.0,
    memory_mb: int = 512,
    output_bytes: int = 2**20,
) -> CodeReward:
    """Run a program on the tests of an APPS problem and reward it.

    A test passes or fails as a whole. Once a test times out the remaining ones are not run and count as not passed,
    so that an endless loop costs one timeout.

    Args:
        tests: {"inputs", "outputs"} and, where a function is called, "fn_name"; or the same as JSON text.
        timeout, memory_mb, output_bytes: see `policy.code_sandbox.Limits`.

    Raises:
        ValueError: there are no tests, or this host cannot run programs safely.
    """
    return _reward(program, ProgramTests.read(tests), Limits(timeout, memory_mb, output_bytes))


def _reward(program: str, tests: ProgramTests, limits: Limits) -> CodeReward:
    passed, compared, status, detail = 0, 0, "", ""
    for index, outcome in enumerate(run_program(trusted_launcher(), program, tests.inputs, tests.fn_name, limits)):
        if outcome.status == "ran":
            compared += 1
            passed += tests.matches(index, outcome.output)
        else:
            status = status or outcome.status
            detail = detail or f"test {index + 1}: {outcome.detail or outcome.status}"
    total = len(tests.inputs)
    if status == "compile_error":
        return CodeReward(-1.0, "compile_error", 0, total, detail)
    if not compared:
        return CodeReward(-0.6, status or "runtime_error", 0, total, detail)  # type: ignore[arg-type]
    return CodeReward(-0.3 + 1.3 * (passed / total), "passed" if passed == total else "failed", passed, total, detail)


def reward_programs(
    programs: Sequence[str], tests: Sequence[ProgramTests], execution: CodeExecution
) -> list[CodeReward]:
    """Reward many programs, `--code_workers` at a time.

    Raises:
        ValueError: running programs was not allowed, or this host cannot do it safely.
    """
    if not execution.allow_code_execution:
        raise ValueError(
            "rewards for programs run what the policy wrote; --allow_code_execution true permits it, in a sandbox "
            "without network, environment or files of this host."
        )
    trusted_launcher()  # once, and before there are threads
    with ThreadPoolExecutor(execution.workers) as pool:
        return list(pool.map(_reward, programs, tests, [execution.limits] * len(programs)))


def code_rewards(
    prompts: Sequence[Any], completions: Sequence[Any], *, execution: Any = None, **columns: Any
) -> list[float]:
    """Reward the program in each answer; a reward function for `functools.partial(code_rewards, execution=…)`.

    Args:
        prompts: not read: the tests say what a program has to do.
        completions: answers as text or messages, one for each prompt.
        execution: a `CodeExecution`, the permission to run programs and their limits; nothing else permits it.
        columns: the data's columns, one value an answer; `tests` or APPS's own `input_output` is read.

    Raises:
        ValueError: no permission, no such column, an answer without tests, or a host that cannot do it safely.
    """
    if not isinstance(execution, CodeExecution):  # such as a data column of that name
        execution = CodeExecution()
    name = next((column for column in COLUMNS if columns.get(column) is not None), None)
    if name is None:
        found = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"rewards for programs need the column 'tests' or 'input_output' (columns: {found}).")
    tests = [ProgramTests.read(value, f"answer {row}, column '{name}'") for row, value in enumerate(columns[name])]
    if len(tests) != len(completions):
        raise ValueError(f"column '{name}' has {len(tests)} values for {len(completions)} answers.")
    programs = [extract_program(answer if isinstance(answer, str) else answer[-1]["content"]) for answer in completions]
    return [reward.value for reward in reward_programs(programs, tests, execution)]
