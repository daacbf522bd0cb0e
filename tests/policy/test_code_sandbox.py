"""The sandbox against programs that try it: what they reach, what they use up, and what is left of them."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from policy import code_sandbox
from policy.code_promises import broken_promises, trusted_launcher
from policy.code_sandbox import Launcher, Limits, launchers, run_program

LIMITS = Limits(timeout=1.0, memory_mb=256, output_bytes=100_000)
PATIENT = Limits(timeout=20.0, memory_mb=256, output_bytes=100_000)


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def launcher(request) -> Launcher:
    found = {launcher.name: launcher for launcher in launchers()}
    if request.param not in found:
        pytest.skip(f"this host has no {request.param}")
    try:
        assert broken_promises(found[request.param]) == []
    except ValueError as error:
        pytest.skip(str(error))
    return found[request.param]


def outcomes(launcher: Launcher, program: str, *inputs: str, limits: Limits = PATIENT) -> list[tuple[str, str]]:
    """Run a program on texts for its standard input; ("ran", what it printed) or (status, the error) for each."""
    found = run_program(launcher, textwrap.dedent(program), list(inputs or [""]), None, limits)
    return [(o.status, o.output.decode() if o.status == "ran" else o.detail) for o in found]


@pytest.fixture
def run(launcher):
    """Run a program as `outcomes` does, under each launcher: what they must see to."""
    return partial(outcomes, launcher)


@pytest.fixture(scope="module")
def run_once():
    """Run a program as `outcomes` does, under one launcher: what the runner inside sees to."""
    try:
        return partial(outcomes, trusted_launcher())
    except ValueError as error:
        pytest.skip(str(error))


def alive(marker: str) -> bool:
    """Whether a process of this host has the marker among its words."""
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in words.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def test_standard_input_and_output_are_pipes_and_tests_share_no_state(run_once):
    program = """
    import builtins, os, stat
    print(getattr(builtins, "seen", 0), os.listdir("."), [stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (0, 1)])
    builtins.seen, name = 1, input()
    open(name, "w").write("x")
    print(input(), end="")
    """
    fresh = "0 [] [True, True]\n"
    assert run_once(program, "a\nÄ", "b\n2\n") == [("ran", fresh + "Ä"), ("ran", fresh + "2")]


def test_large_inputs_arrive_whole_and_need_not_be_read(run_once):
    text = "7" * 3_000_000
    assert run_once("print(len(input()))", text) == [("ran", "3000000\n")]
    assert run_once("print('done')", text) == [("ran", "done\n")]


@pytest.mark.parametrize(
    "program, status, said",
    [
        ("print(", "compile_error", "SyntaxError: '(' was never closed"),
        ("x = '\\0'\0", "compile_error", "null byte"),
        ("1 / 0", "runtime_error", "ZeroDivisionError: division by zero"),
        ("import sys; print(5); sys.exit(3)", "runtime_error", "ended with exit status 3"),
        ("import os; os.abort()", "runtime_error", "ended by signal 6"),
        ("f = lambda n: f(n + 1)\nf(0)", "runtime_error", "RecursionError"),
        ("raise KeyboardInterrupt", "runtime_error", "KeyboardInterrupt"),
        ("bytearray(2 * 2**30)", "memory", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(2**20))", "memory", "MemoryError"),
        ("while True: print('y' * 1000)", "output", ""),
        ("while True: pass", "timeout", ""),
        ("import time; time.sleep(99)", "timeout", ""),
        ("import signal, time\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n"
         "  except OSError: pass\nwhile True: pass", "timeout", ""),
    ],
)  # fmt: skip
def test_b49_each_status(run_once, program, status, said):
    limits = LIMITS if status == "timeout" else PATIENT
    ((found, detail),) = run_once(program, limits=limits)
    assert found == status and said in detail


@pytest.mark.parametrize(
    "program, printed",
    [
        ("import sys; print(1); sys.exit()", "1\n"),
        ("import os; print(2, flush=True); os._exit(0)", "2\n"),
        ("import threading; threading.Thread(target=print, args=(3,)).start()", "3\n"),
        ("import atexit; atexit.register(print, 4)", "4\n"),
        ("if __name__ == '__main__': print(5)", "5\n"),
        ("print(len(str(10**9999)))", "10000\n"),
        ("import sys; sys.stderr.write('x' * 10**6); print(6)", "6\n"),
        ("import os; os.write(1, b'7'); os.close(1)", "7"),
        ("import numpy; print(int(numpy.ones(8) @ numpy.ones(8)))", "8\n"),
        (
            "def f(n):\n  return n and 1 + f(n - 1)\nimport sys; sys.setrecursionlimit(10**5); print(f(20000))",
            "20000\n",
        ),
    ],
)
def test_ways_to_end_well(run_once, program, printed):
    assert run_once(program) == [("ran", printed)]


def test_a_test_ends_when_all_its_processes_have(run_once):
    program = "import os, time\nif os.fork() == 0: time.sleep(0.3)\nprint('x', end='')"
    assert run_once(program) == [("ran", "xx")]


def test_the_first_test_that_times_out_is_the_last(run_once):
    program = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert run_once(program, "1", "2", "3", limits=LIMITS) == [("ran", "1\n"), ("timeout", "")]


def test_b49_no_environment(run, monkeypatch):
    monkeypatch.setenv("SEGREW_SECRET", "x")
    program = "import ctypes, os; ctypes.CDLL(None).getenv.restype = ctypes.c_char_p; print(dict(os.environ))"
    assert run(program) == [("ran", "{}\n")]


def test_b49_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        program = """
        import socket
        try:
            socket.create_connection(("127.0.0.1", int(input())), timeout=5)
        except OSError as error:
            print("no")
        """
        assert run(program, str(port)) == [("ran", "no\n")]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_b49_no_files_but_python_and_a_small_directory(run, tmp_path):
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    os.chmod(tmp_path, 0o777)
    program = """
    import os, sys
    for path in (input(), "/etc/passwd", "/proc/1/fd/0", "/proc/self/environ", "/root/.bashrc"):
        try:
            print(open(path).read())
        except OSError as error:
            print(type(error).__name__)
    written = 0
    for folder in {"/", "/usr", "/dev", "/etc", sys.prefix, os.path.dirname(os.__file__), os.path.dirname(os.getcwd())}:
        try:
            written += bool(open(folder + "/x", "w"))
        except OSError:
            continue
        assert folder == os.path.dirname(os.getcwd()), folder
    """
    assert run(program, str(secret)) == [("ran", "FileNotFoundError\n" * 5)]
    assert list(tmp_path.iterdir()) == [secret]


def test_pythons_packages_are_read_only(run, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "helpful.py").write_text("value = 7")
    os.chmod(packages, 0o777)
    monkeypatch.setattr(code_sandbox, "_packages", lambda: [str(packages)])
    program = """
    import helpful
    try:
        open(helpful.__file__ + "x", "w")
    except OSError as error:
        print(helpful.value, error.strerror)
    """
    assert run(program) == [("ran", "7 Read-only file system\n")]


def test_limits_of_the_disk_and_of_open_files(run):
    program = """
    written, opened = 0, []
    try:
        for i in range(100):
            with open(f"{i}", "wb") as file:
                file.write(bytes(2**20))
            written += 1
    except OSError:
        print(25 < written <= 32)
    try:
        open("large", "wb").write(bytes(9 * 2**20))
    except OSError:
        print("too large")
    try:
        while True:
            opened.append(open("/dev/null"))
    except OSError:
        print(len(opened) < 64)
    """
    assert run(program, "", "") == [("ran", "True\ntoo large\nTrue\n")] * 2


def test_b49_processes_are_few_and_do_not_survive(run):
    program = """
    import os, time
    started = 0
    try:
        while True:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            started += 1
    except OSError:
        assert 5 < started < 16, started
    if input() == "clean up":
        os.kill(-1, 9)
    """
    assert run(program, "clean up", "clean up", "leave them", limits=Limits(timeout=4.0)) == [
        ("ran", ""), ("ran", ""), ("timeout", "left a process running"),
    ]  # fmt: skip


def test_b49_a_child_in_a_session_of_its_own_is_gone_and_its_program_has_not_passed(run):
    marker = f"{time.time_ns()}.5"
    program = f"""
    import os, subprocess
    print("right", flush=True)
    subprocess.Popen(["/bin/sleep", "{marker}"], start_new_session=True)
    """
    assert run(program, limits=LIMITS) == [("timeout", "left a process running")]
    assert not alive(marker)
    waits = f"import subprocess; subprocess.run(['/bin/sleep', '{marker}'], start_new_session=True)"
    assert run(waits, limits=LIMITS) == [("timeout", "")]
    assert not alive(marker)


def test_the_process_around_a_program_cannot_be_ended_or_read(run):
    program = """
    import ctypes, os, signal
    for sent in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        os.kill(1, sent)
    print(os.getppid(), ctypes.CDLL(None).ptrace(16, 1, 0, 0))
    """
    assert run(program, "", "") == [("ran", "1 -1\n")] * 2


def test_forged_reports_do_not_stand_in_for_later_tests(run_once):
    program = """
    import os
    for fd in range(3, 64):
        try:
            os.write(fd, b'["ran", "", 5]\\nright' * 3)
        except OSError:
            pass
    print("wrong")
    """
    assert "right" not in [printed for _, printed in run_once(program, "", "")]


def test_programs_side_by_side_do_not_share_the_limit_on_processes(launcher):
    program = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range(8)]
for thread in threads: thread.start()
print(len(threads))
"""

    def once(_):
        return [o.output for o in run_program(launcher, program, [""], None, Limits(timeout=20.0))]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(once, range(6))) == [[b"8\n"]] * 6


def test_b49_a_flood_is_not_held_in_memory(run_once):
    limits = Limits(timeout=20.0, memory_mb=256, output_bytes=2**20)
    tracemalloc.start()
    try:
        assert run_once("while True: print('x' * 9999)", "", "", limits=limits) == [("output", "")] * 2
        assert run_once("print('x' * (2**20 - 1))", limits=limits) == [("ran", "x" * (2**20 - 1) + "\n")]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


def test_closing_the_iterator_ends_the_program(launcher):
    marker = f"{time.time_ns()}.25"
    program = f"n = input()\nif n == '2':\n  import os; os.execv('/bin/sleep', ['/bin/sleep', '{marker}'])\nprint(n)"
    outcomes = run_program(launcher, program, ["1", "2"], None, PATIENT)
    assert next(outcomes).output == b"1\n"
    outcomes.close()
    assert not alive(marker)


def test_b49_programs_end_with_a_scorer_that_is_killed(launcher):
    marker = f"{time.time_ns()}.75"
    scorer = f"""
from policy.code_sandbox import *
limits = Limits(timeout=300, memory_mb=256)
launcher = next(found for found in launchers() if found.name == "{launcher.name}")
program = "import os; os.execv('/bin/sleep', ['/bin/sleep', '{marker}'])"
list(run_program(launcher, program, [""], None, limits))
"""
    process = subprocess.Popen([sys.executable, "-c", scorer], cwd=Path(code_sandbox.__file__).parents[1])
    until(lambda: alive(marker))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not alive(marker))


def until(condition):
    """Wait for what must come; a minute means that it does not."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def test_a_sandbox_that_does_not_start_is_an_error_with_its_reason():
    broken = Launcher("broken", ("/bin/sh", "-c", "echo no namespaces here >&2; exit 1"))
    with pytest.raises(ValueError, match=r"\(broken\) did not start: no namespaces here"):
        list(run_program(broken, "print(1)", [""], None, PATIENT))


def test_the_runner_refuses_to_run_outside_a_namespace():
    runner = Path(code_sandbox.__file__).with_name("code_runner.py")
    done = subprocess.run([sys.executable, str(runner)], input=b"{}", capture_output=True)
    assert done.returncode == 1 and b"process 1" in done.stderr


@pytest.mark.parametrize("name", ["timeout", "memory_mb", "output_bytes"])
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} 0"):
        Limits(**{name: 0})
