"""Running programs that nobody has read: a process namespace each, without network, environment or the host's files."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESSES, OPEN_FILES, FILE_BYTES, DISK_BYTES = 16, 64, 8 * 2**20, 32 * 2**20
START_SECONDS = 60  # for Python to start on a busy machine, before any test's clock runs
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
WORKING_DIRECTORY = "/program"

_users = itertools.count(os.getpid() * 61)


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        timeout: seconds of wall time, and as many of processor time, for each test, which ends
            when all processes that it started have ended.
        memory_mb: address space of each process, in MiB; there may be `PROCESSES` of them, threads counted.
        output_bytes: of standard output, and of a returned value as JSON, for each test.
    """

    timeout: int | float = 4.0
    memory_mb: int = 512
    output_bytes: int = 2**20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} {value}: the limit of a program must be positive.")


@dataclass(frozen=True)
class Outcome:
    """What came of one test.

    Args:
        status: "ran", or why there is nothing to compare: runtime_error, compile_error, timeout, memory, output.
        detail: the error in a line, if there was one.
        output: standard output, or the returned value as JSON (empty if JSON cannot say it).
    """

    status: str
    detail: str
    output: bytes


@dataclass(frozen=True)
class Launcher:
    """A way to start a command in namespaces of its own: the words that go before bubblewrap's options."""

    name: str
    words: tuple[str, ...]


def launchers() -> list[Launcher]:
    """Return the ways that this host may have, the best known first."""
    found = []
    bwrap = shutil.which("bwrap")
    if bwrap:
        words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        as_root = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # until the runner has become another user
        found.append(Launcher("bubblewrap", (*words, *(as_root if os.geteuid() == 0 else ["--unshare-user"]))))
    if sys.platform == "linux":
        script = str(Path(__file__).with_name("code_namespaces.py"))
        found.append(Launcher("namespaces", (sys.executable, "-I", "-S", script)))
    return found


def _options() -> list[str]:
    """The file system of a program, in bubblewrap's words: Python read-only, and one small directory to write in."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, *_packages())
    shown: list[Path] = []
    for path in (Path(name) for name in (*SYSTEM, *dict.fromkeys(prefixes))):
        if path.exists() and not any(path.is_relative_to(other) for other in shown):
            shown.append(path)
    above = {parent: None for path in (*shown, *map(Path, DEVICES)) for parent in reversed(path.parents[:-1])}
    folders = [word for path in above for word in ("--perms", "755", "--dir", str(path))]
    binds = [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
    disk = ["--perms", "1777", "--size", str(DISK_BYTES), "--tmpfs", WORKING_DIRECTORY]
    return [*folders, *binds, *devices, *disk, "--remount-ro", "/", "--chdir", WORKING_DIRECTORY]


def _packages() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def run_program(
    launcher: Launcher, program: str, inputs: list[Any], fn_name: str | None, limits: Limits
) -> Iterator[Outcome]:
    """Run a program on its tests, one after another, and yield what came of each.

    The sandbox is gone, with every process that the program started, when the iterator is exhausted or closed. After
    a timeout or a compile error the remaining tests are not run.

    Args:
        inputs: texts for standard input, or lists of arguments for `fn_name`.

    Raises:
        ValueError: the sandbox did not start.
    """
    job = {
        "program": program, "inputs": inputs, "fn_name": fn_name, "packages": _packages(),
        "uid": 40_000 + next(_users) % 20_000 if os.geteuid() == 0 else None,
        "processes": PROCESSES, "open_files": OPEN_FILES, "file_bytes": FILE_BYTES, **vars(limits),
    }  # fmt: skip
    with _started(launcher, START_SECONDS + len(inputs) * (limits.timeout + 1)) as process:
        try:
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended early, and says why on standard error
        if _frame(process.stdout, limits.output_bytes) is None:
            reason = process.stderr.read(2000).decode("utf-8", "replace").strip()
            raise ValueError(f"the sandbox for programs ({launcher.name}) did not start: {reason or 'no reason given'}")
        for _ in inputs:
            outcome = _frame(process.stdout, limits.output_bytes)
            if outcome is None:
                break
            yield outcome


@contextmanager
def _started(launcher: Launcher, seconds: int | float) -> Iterator[Any]:
    """A runner in its sandbox, killed at the end of the block, or after `seconds` if it hangs."""
    runner = Path(__file__).with_name("code_runner.py").read_text(encoding="utf-8")
    python = [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", runner]
    process: Any = subprocess.Popen(
        [*launcher.words, *_options(), "--", *python],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/", start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.stdout.close()  # the runner exits when nobody listens
        if process.poll() is None and not _ends(process):
            process.kill()
        process.wait()
        process.stderr.close()


def _ends(process: Any) -> bool:
    """Give the runner a moment to go by itself, so that all of its namespace is gone when the launcher is."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        return False
    return True


def _frame(stream: Any, output_bytes: int) -> Outcome | None:
    """Read a frame of the runner's; None at the end, or where the stream is no frame."""
    try:
        status, detail, size = json.loads(stream.readline(4096))
        if not 0 <= size <= output_bytes:
            return None
        output = stream.read(size)
    except (ValueError, TypeError):
        return None
    return Outcome(str(status), str(detail), output) if len(output) == size else None
