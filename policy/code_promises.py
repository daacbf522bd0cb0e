"""Whether this host keeps the sandbox's promises: a program that tries to break each, run before any other."""

import json
import os
import socket
import sys
import tempfile
from functools import cache

from policy.code_sandbox import FILE_BYTES, PROCESSES, Launcher, Limits, launchers, run_program

_ADVICE = (
    "Install bubblewrap (the package of that name), and allow user namespaces where they are turned off (sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a security "
    "profile that permits unshare). Programs are not run otherwise."
)

_BREAKER = """
import json, os, signal, socket, time

facts, broken = json.loads(input()), []

def promise(name):
    def check(breaks):
        try:
            if breaks():
                broken.append(name)
        except (OSError, MemoryError):
            pass
    return check

@promise("no environment variables")
def _():
    return bool(os.environ)

@promise("no network")
def _():
    return socket.create_connection(("127.0.0.1", facts["port"]), timeout=5)

@promise("no files of this host but Python's own")
def _():
    return open(facts["file"])

@promise("no writing outside the working directory")
def _():
    written = 0
    for folder in ("/", "/usr", "/bin", "/dev", os.path.dirname(os.__file__)):
        try:
            written += open(os.path.join(folder, "segrew-probe"), "w") is not None
        except OSError:
            pass
    return written

@promise("an end to all its processes")
def _():
    return os.getppid() != 1

@promise("a limit on file size")
def _():
    with open("large", "wb") as file:
        return file.write(bytes(facts["file_bytes"] + 1))

@promise("a limit on memory")
def _():
    return bytearray(facts["memory"])

@promise("a limit on the number of processes")
def _():
    children = []
    try:
        while len(children) < facts["processes"]:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
        return True
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

print(json.dumps(broken))
"""


@cache
def trusted_launcher() -> Launcher:
    """Return the first way to start programs that keeps every promise here.

    Raises:
        ValueError: there is none; the message says which promise failed and what to install.
    """
    if sys.platform != "linux":
        raise ValueError("running programs needs Linux: only there can segrew keep them from files and the network.")
    failures = []
    for launcher in launchers():
        try:
            broken = broken_promises(launcher)
        except ValueError as error:
            failures.append(str(error))
            continue
        if not broken:
            return launcher
        failures.append(f"{launcher.name} does not keep: {', '.join(broken)}")
    raise ValueError(f"programs cannot be run safely on this host: {'; '.join(failures)}. {_ADVICE}")


def broken_promises(launcher: Launcher) -> list[str]:
    """Run the program that tries to break the promises; return those that it broke.

    Raises:
        ValueError: it could not even be started or finished.
    """
    limits = Limits(timeout=30, memory_mb=256)
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.NamedTemporaryFile(prefix="segrew") as file:
        os.chmod(file.name, 0o644)
        facts = {
            "port": listener.getsockname()[1],
            "file": file.name,
            "file_bytes": FILE_BYTES,
            "memory": limits.memory_mb * 2**20,
            "processes": PROCESSES,
        }
        (outcome,) = run_program(launcher, _BREAKER, [json.dumps(facts)], None, limits)
    if outcome.status != "ran":
        raise ValueError(f"{launcher.name} did not finish the check of its promises ({outcome.detail})")
    return json.loads(outcome.output)
