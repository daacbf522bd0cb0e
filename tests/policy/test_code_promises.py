"""The check of the host: it finds each hole, and refuses with what is broken and what to install."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from policy import code_promises
from policy.code_promises import broken_promises, trusted_launcher
from policy.code_sandbox import Launcher

# The namespaces of policy/code_namespaces.py, but with the host's network and a directory of its files.
LEAKY = """
import runpy, sys
space = runpy.run_path(sys.argv[1])
space["enter"].__globals__["NEW_OTHERS"] &= ~0x40000000
space["main"](["--ro-bind", sys.argv[2], sys.argv[2], *sys.argv[3:]])
"""


@pytest.fixture
def leaky(tmp_path, monkeypatch) -> Launcher:
    try:
        trusted_launcher()
    except ValueError as error:
        pytest.skip(str(error))
    folder = tmp_path / "files"
    folder.mkdir()
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    script = str(Path(code_promises.__file__).with_name("code_namespaces.py"))
    return Launcher("leaky", (sys.executable, "-I", "-S", "-c", LEAKY, script, str(folder)))


@pytest.fixture(autouse=True)
def forget():
    yield
    trusted_launcher.cache_clear()


def test_what_a_sandbox_leaves_open_is_found(leaky):
    assert broken_promises(leaky) == ["no network", "no files of this host but Python's own"]


def test_the_host_is_refused_with_the_promise_and_what_to_install(leaky, monkeypatch):
    trusted_launcher.cache_clear()
    broken = Launcher("absent", ("/bin/sh", "-c", "echo Operation not permitted >&2; exit 1"))
    monkeypatch.setattr(code_promises, "launchers", lambda: [broken, leaky])
    with pytest.raises(ValueError) as refusal:
        trusted_launcher()
    for words in (
        "(absent) did not start: Operation not permitted",
        "leaky does not keep: no network, no files",
        "bubblewrap",
    ):
        assert words in str(refusal.value)


def test_other_systems_are_refused(monkeypatch):
    trusted_launcher.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="needs Linux"):
        trusted_launcher()


def test_the_first_launcher_that_keeps_all_is_taken(leaky, monkeypatch):
    trusted = trusted_launcher()
    trusted_launcher.cache_clear()
    monkeypatch.setattr(code_promises, "launchers", lambda: [leaky, trusted])
    assert trusted_launcher() is trusted
