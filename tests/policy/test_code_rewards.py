"""Rewards for programs: the rule, problems of every form, and programs that want a reward they do not deserve."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from policy.code_promises import trusted_launcher
from policy.code_rewards import CodeExecution, CodeReward, apps_reward, code_rewards, reward_programs
from policy.code_tests import ProgramTests
from segrew.config import parse

ALLOWED = CodeExecution(allow_code_execution=True, code_timeout=20.0, code_memory_mb=256, code_workers=2)
DOUBLE = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]}
SECRET = {"inputs": [[1]], "outputs": ["the answer only the scorer knows"], "fn_name": "f"}


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    try:
        trusted_launcher()
    except ValueError as error:
        pytest.skip(str(error))


def reward(program, tests, **limits) -> CodeReward:
    return apps_reward(program, tests, **{"timeout": 20, "memory_mb": 256, "output_bytes": 100_000} | limits)


@pytest.mark.parametrize(
    "program, value, status, passed",
    [
        ("print(int(input()) * 2)", 1.0, "passed", 4),
        ("n = int(input()); print(n * 2 if n < 3 else 0)", 0.35, "failed", 2),
        ("n = int(input()); print(n * 2 if n < 2 else 0)", 0.025, "failed", 1),
        ("print(0)", -0.3, "failed", 0),
        ("raise ValueError", -0.6, "runtime_error", 0),
        ("print(", -1.0, "compile_error", 0),
        ("n = int(input()); print(n * 2); 1 / (n - 4)", 0.675, "failed", 3),  # a crash beside others: not passed
        ("n = int(input()); 1 / (n - 4); print(0)", -0.3, "failed", 0),
        ("n = int(input())\nif n % 2: bytearray(10**10)\nraise ValueError", -0.6, "memory", 0),  # what the first met
    ],
)
def test_the_rule(program, value, status, passed):
    """Invariant 37."""
    rewarded = reward(program, DOUBLE)
    assert (rewarded.value, rewarded.status, rewarded.passed, rewarded.total) == (
        pytest.approx(value), status, passed, 4,
    )  # fmt: skip


def test_all_passed_is_exactly_one_for_any_number_of_tests():
    for total in (1, 3, 13):  # 1.3 · 13 / 13 is no 1.3
        assert reward("print(5)", {"inputs": [""] * total, "outputs": ["5"] * total}).value == 1.0


@pytest.mark.parametrize(
    "program, status",
    [("while True: pass", "timeout"), ("x = bytes(2**31)", "memory"), ("while True: print('x' * 999)", "output")],
)
def test_a_program_that_breaks_a_limit_has_that_status(program, status):
    rewarded = reward(program, DOUBLE, **({"timeout": 0.5} if status == "timeout" else {}))
    assert (rewarded.value, rewarded.status) == (-0.6, status)


def test_tests_after_a_timeout_are_not_run_and_not_passed():
    program = "n = int(input())\nwhile n == 3: pass\nprint(n * 2)"
    rewarded = reward(program, DOUBLE, timeout=1)
    assert (rewarded.value, rewarded.status, rewarded.passed) == (pytest.approx(0.35), "failed", 2)
    assert rewarded.detail == "test 3: timeout"


@pytest.mark.parametrize(
    "program, tests",
    [
        ("def f(a, b): return a + b", {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}),
        ("def f(a, b): return a, b", {"inputs": [[1, 2]], "outputs": [[1, 2]]}),
        ("def f(n): return n > 2", {"inputs": [[3], [1]], "outputs": [[True], [False]]}),
        ("class Solution:\n  def f(self, a: List[int]): return max(a)", {"inputs": [[[3, 9]]], "outputs": [9]}),
        ("class Solution:\n  pass\ndef f(n): return n", {"inputs": [[3]], "outputs": [3]}),
        ("def f(n): return pow(3, n)", {"inputs": [[200]], "outputs": [3**200]}),
        ("def f(d): return {k + 1: v for k, v in d.items()}", {"inputs": [[{"1": "a"}]], "outputs": [{"2": "a"}]}),
        ("import numpy\ndef f(n): return numpy.arange(n)", {"inputs": [[3]], "outputs": [[0, 1, 2]]}),
        ("print('loading')\ndef f(n): print('x'); return n", {"inputs": [[3]], "outputs": [3]}),
        ("def f(n): return Counter('aab').most_common(n)", {"inputs": [[1]], "outputs": [[["a", 2]]]}),
    ],
)  # fmt: skip
def test_functions_are_called(program, tests):
    assert reward(program, tests | {"fn_name": "f"}).status == "passed"


@pytest.mark.parametrize(
    "program, status",
    [
        ("x = 1", "runtime_error"),
        ("def f(n): return {n}", "failed"),
        ("def f(): return 1", "runtime_error"),
        ("def f(n): print(1)", "failed"),
        ("def f(n):\n  x = []\n  x.append(x)\n  return x", "failed"),
        ("import sys\ndef f(n): sys.exit()", "runtime_error"),
    ],
)
def test_functions_that_are_missing_or_wrong(program, status):
    assert reward(program, {"inputs": [[1]], "outputs": [1], "fn_name": "f"}).status == status


@pytest.mark.parametrize(
    "program",
    [
        "class Same(str):\n  __eq__ = lambda *a: True\n  __hash__ = str.__hash__\ndef f(n): return Same('x')",
        "import os\nos._exit(0)",
        "import json\njson.dumps = lambda *a, **k: '\"the answer only the scorer know\"'\ndef f(n): return 1",
        "import builtins\nbuiltins.all = builtins.any = lambda *a: True\ndef f(n): return 1",
        # everything that this process and the one around it know of the tests
        """
import gc, os, sys
def f(n):
    found, frame = [], sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(list(frame.f_globals)))
        frame = frame.f_back
    text = " ".join(found) + " ".join(o for o in gc.get_objects() if isinstance(o, str)) + repr(sys.argv)
    for path in ("/proc/1/environ", "/proc/1/cmdline", "/proc/1/mem"):
        try:
            text += open(path, errors="replace").read()
        except OSError:
            pass
    at = text.find("the answer only")
    return text[at : at + 32]
""",
        # a report of its own on every descriptor
        """
import os
def f(n):
    for fd in range(64):
        for forged in (b'["ran", "", 34]\\n"the answer only the scorer known"', b'value\\n"x"', b"passed"):
            try:
                os.write(fd, forged)
            except OSError:
                pass
    return 1
""",
    ],
    ids=["equals everything", "exits first", "patches json", "patches builtins", "looks around", "forges reports"],
)
def test_programs_that_tamper_pass_nothing(program):
    assert reward(program, SECRET).passed == 0


def test_no_tests_are_an_error():
    with pytest.raises(ValueError, match="no tests"):
        apps_reward("print(1)", {"inputs": [], "outputs": []})


def test_answers_are_rewarded_in_order_from_the_datas_columns():
    answers = ["```python\nprint(int(input()) * 2)\n```", [{"role": "assistant", "content": "print(0)"}], "Sorry, no."]
    for column in ({"tests": [DOUBLE] * 3}, {"input_output": [json.dumps(DOUBLE)] * 3}):
        rewards = partial(code_rewards, execution=ALLOWED)(prompts=[[]] * 3, completions=answers, **column, other=[1])
        assert rewards == [1.0, -0.3, -1.0]


def test_b47_good_failing_and_sleeping_programs_from_a_worker_thread():
    """Signals that end a program late would fail outside the main thread, and one sleeper would hold up the rest."""
    execution = CodeExecution(allow_code_execution=True, code_timeout=4.0, code_memory_mb=256, code_workers=2)
    sleeper = "import time; time.sleep(999)"
    programs = ["print(int(input()) * 2)", sleeper, sleeper, "1 / 0", "print(int(input()) * 2)"]
    tests = [ProgramTests.read(DOUBLE, "here")] * len(programs)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reward_programs, programs, tests, execution).result()
    assert [one.status for one in found] == ["passed", "timeout", "timeout", "runtime_error", "passed"]
    assert [one.value for one in found] == [1.0, -0.6, -0.6, -0.6, 1.0]


def test_nothing_is_run_without_permission():
    for execution in (None, CodeExecution(), [True]):  # the last: a data column of that name
        with pytest.raises(ValueError, match="--allow_code_execution true"):
            code_rewards([""], ["print(1)"], execution=execution, tests=[DOUBLE])


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"answer": ["1"]}, r"'tests' or 'input_output' \(columns: answer\)"),
        ({"tests": [None]}, "answer 0, column 'tests': no tests"),
        ({"tests": [DOUBLE, DOUBLE]}, "2 values for 1 answers"),
    ],
)
def test_columns_that_do_not_serve(columns, message):
    with pytest.raises(ValueError, match=message):
        code_rewards([""], ["print(1)"], execution=ALLOWED, **columns)


def test_a_host_that_keeps_no_promises_runs_nothing(monkeypatch):
    def refuse():
        raise ValueError("programs cannot be run safely on this host")

    monkeypatch.setattr("policy.code_rewards.trusted_launcher", refuse)
    with pytest.raises(ValueError, match="cannot be run safely"):
        reward_programs(["print(1)"], [ProgramTests.read(DOUBLE)], ALLOWED)


def test_settings_are_flags():
    (execution,) = parse("ppo", (CodeExecution,), ["--allow_code_execution", "true", "--code_timeout", "2.5"])
    assert execution.allow_code_execution and execution.limits.timeout == 2.5 and execution.workers >= 1
    with pytest.raises(ValueError, match="--code_workers 0"):
        CodeExecution(code_workers=0)


DATA = Path(os.environ.get("SEGREW_TEST_DATA", "/nowhere")) / "code"


@pytest.mark.skipif(not DATA.is_dir(), reason="SEGREW_TEST_DATA names no folder with the real files")
def test_reference_solutions_of_real_problems_pass():
    rows = [json.loads(line) for line in (DATA / "apps_format_from_apps.jsonl").read_text().splitlines()]
    programs = [json.loads(row["solutions"])[0] for row in rows]
    tests = [ProgramTests.read(row["input_output"]) for row in rows]
    assert [reward.status for reward in reward_programs(programs, tests, ALLOWED)] == ["passed"] * len(rows)
