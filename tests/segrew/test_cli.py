"""A user's mistake gets one readable line and exit code 2; nothing is overwritten."""

import gzip
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from segrew.cli import COMMANDS, main


@pytest.fixture
def refusal(capsys):
    """Run a command that must fail, and return its one line."""

    def run(*argv) -> str:
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("segrew"), lines
        return lines[0]

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists(name):
    module, _, function = COMMANDS[name][0].partition(":")
    assert callable(getattr(import_module(module), function))


def test_usage_lists_every_command(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert [line.split()[0] for line in usage.splitlines() if line.startswith("  ")] == [*COMMANDS, *COMMANDS]


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["train_rm"]) == 2
    assert capsys.readouterr().err == "segrew: no command 'train_rm'; did you mean 'train-rm'?\n"
    assert main(["xyz"]) == 2
    assert "there are: demo" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError])
def test_user_errors_are_one_line_even_with_line_breaks_inside(monkeypatch, refusal, error):
    def fail(argv):
        raise error("first\n  second")

    monkeypatch.setattr("segrew.data_command.main", fail)
    assert refusal("data") == "segrew data: error: first second"


def test_our_own_mistakes_and_asked_for_tracebacks_are_raised(monkeypatch):
    def fail(error):
        def run(argv):
            raise error

        return run

    monkeypatch.setattr("segrew.data_command.main", fail(AssertionError("ours")))
    with pytest.raises(AssertionError):
        main(["data"])
    monkeypatch.setattr("segrew.data_command.main", fail(ValueError("yours")))
    monkeypatch.setenv("SEGREW_TRACEBACK", "1")
    with pytest.raises(ValueError, match="yours"):
        main(["data"])


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    def stop(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("segrew.data_command.main", stop)
    assert main(["data"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_b40_in_a_process_of_its_own(tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text("learning_ratee: 1e-5\n")
    argv = [sys.executable, "-m", "segrew", "train-rm", "--config", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "unknown setting 'learning_ratee'; did you mean 'learning_rate'?" in line


GOOD = {"prompt": "Say hi.", "chosen": "Hello there.", "rejected": "Go away."}

BAD_FILES = {
    "missing": (None, "no such file"),
    "empty": (b"", "holds no rows"),
    "blank": (b"\n\n", "holds no rows"),
    "malformed": (json.dumps(GOOD).encode() + b'\n{"prompt": "x", "chos', "line 2: not valid JSON"),
    "no_object": (json.dumps(GOOD).encode() + b"\n[]\n", "line 2: expected a JSON object"),
    "latin1": (json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}', "line 2: not UTF-8"),
    "unknown_column": (b'{"question": "x", "chosen": "a", "rejected": "b"}', "line 1: no column 'prompt'"),
    "no_rejected": (b'{"prompt": "x", "chosen": "a"}', "line 1: no column 'rejected'"),
    "no_usable": (
        b'{"prompt": "x", "chosen": "a", "rejected": "a"}\n' * 3,
        "0 of 3 rows are usable pairs (3 identical",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("command", ["train-rm", "segment", "data"])
def test_bad_data_is_refused_with_file_and_line(refusal, tmp_path, tiny_dir, name, command):
    content, message = BAD_FILES[name]
    path, out = tmp_path / f"{name}.jsonl", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    output = [] if command == "data" else ["--output_dir", out]
    line = refusal(command, "--model_name_or_path", tiny_dir, "--dataset_name", path, *output)
    assert message in line and str(path) in line
    assert not out.exists()


def test_broken_gzip_is_refused(refusal, tmp_path, tiny_dir):
    whole = gzip.compress("".join(json.dumps(GOOD | {"id": str(i)}) + "\n" for i in range(999)).encode())
    for content in (b"no gzip", whole[: len(whole) // 2], whole[:40] + b"\0\1\2\3\4" * 9 + whole[90:]):
        path = tmp_path / "pairs.jsonl.gz"
        path.write_bytes(content)
        assert str(path) in refusal("data", "--model_name_or_path", tiny_dir, "--dataset_name", path)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rule", "paragraph"], "rule"),
        (["--temperature", "0"], "--temperature 0.0: must be positive"),
        (["--temperature", "-1"], "--temperature -1.0: must be positive"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--threshold", "1", "--quantile", "0.5"], "exclude each other"),
        (["--quantile", "1.5"], "quantile 1.5"),
        (["--threshold", "-3"], "threshold -3: entropies are never negative"),
        (["--n", "0", "--rule", "ngram"], "n 0"),
        (["--max_length", "4"], "--max_length 4"),
        (["--head_penalty", "-1"], "--head_penalty -1.0"),
        (["--lora_r", "0"], "--lora_r 0"),
        (["--learning_rate", "fast"], "fast"),
        (["--chat_template", "nowhere.jinja"], "--chat_template nowhere.jinja"),
    ],
)
def test_bad_settings_of_train_rm_are_refused(refusal, tmp_path, tiny_dir, pairs_file, flags, message):
    out = tmp_path / "out"
    files = ["--model_name_or_path", tiny_dir, "--dataset_name", pairs_file, "--output_dir", out]
    assert message in refusal("train-rm", *files, *flags)
    assert not out.exists()


@pytest.mark.parametrize("command", ["segment", "data"])
def test_a_length_without_room_is_refused_wherever_pairs_are_read(refusal, tiny_dir, pairs_file, command):
    files = ["--model_name_or_path", tiny_dir, "--dataset_name", pairs_file]
    assert "--max_length 0: no room for an answer" in refusal(command, *files, "--max_length", "0")


@pytest.mark.parametrize("command", ["train-rm", "rewardbench", "score", "segment"])
def test_another_run_is_never_overwritten(refusal, tmp_path, tiny_dir, pairs_file, head_dir, command):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("{}")
    (out / "precious.txt").write_text("keep me")
    model = ["--model_name_or_path", tiny_dir] if command in ("train-rm", "segment") else ["--reward_model", head_dir]
    argv = [command, *model, "--dataset_name", pairs_file, "--output_dir", out]
    if command == "rewardbench":
        argv += ["--benchmark", "pairs"]
    assert "already holds a run" in refusal(*argv)
    (out / "run.json").unlink()
    assert "holds no run" in refusal(*argv, "--overwrite_output_dir", "true")
    assert (out / "precious.txt").read_text() == "keep me"


@pytest.mark.parametrize("command", ["rewardbench", "score"])
def test_a_run_is_not_replaced_before_its_successor_can_begin(refusal, tmp_path, head_dir, command):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("{}")
    argv = ["--output_dir", out, "--overwrite_output_dir", "true", "--reward_model"]
    assert "no such file" in refusal(command, *argv, head_dir, "--dataset_name", tmp_path / "none.jsonl")
    pairs = ["--dataset_name", "everyday", "--dataset_split", "test"]
    benchmark = ["--benchmark", "pairs"] if command == "rewardbench" else []
    assert "is no reward-model directory" in refusal(command, *argv, tmp_path, *pairs, *benchmark)
    assert (out / "run.json").exists()


def test_messages_name_the_file_or_the_flag(refusal, tmp_path, tiny_dir, pairs_file):
    cut = shutil.copytree(tiny_dir, tmp_path / "cut")
    (cut / "tokenizer.json").write_text((cut / "tokenizer.json").read_text()[:200])
    files = ["--dataset_name", pairs_file, "--output_dir", tmp_path / "out"]
    line = refusal("train-rm", "--model_name_or_path", cut, *files)
    assert f"no tokenizer can be read from '{cut}'" in line
    assert f"--config {tmp_path}: cannot be read" in refusal("segment", "--config", tmp_path)
    for command in ("segment", "train-rm", "ppo"):
        for seed in (2**70, -1):
            assert f"--seed {seed}: must be at least 0 and below 2**32" in refusal(
                command, "--seed", seed, *files, *(["--reward_model_path", "x"] if command == "ppo" else [])
            )
    assert not (tmp_path / "out").exists()


def test_nothing_marked_is_nothing_to_locate(refusal, tmp_path, head_dir):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    argv = ["--benchmark", "localisation", "--dataset_name", path, "--output_dir", tmp_path / "out"]
    line = refusal("rewardbench", "--reward_model", head_dir, *argv)
    assert f"{path}: none of 1 answers has a marked error" in line and not (tmp_path / "out").exists()


def test_a_missing_model_is_named(refusal, tmp_path, pairs_file):
    out = tmp_path / "out"
    line = refusal(
        "train-rm", "--model_name_or_path", tmp_path / "none", "--dataset_name", pairs_file, "--output_dir", out
    )
    assert str(tmp_path / "none") in line and not out.exists()
