"""`segrew cache`: what it lists, what it deletes, and what it leaves alone."""

import os
import time

import pytest
import torch

from segrew.cli import main
from segrew.embedded_model import EMBEDDED_MODEL, converted_model
from segrew.feature_cache import entries, store


@pytest.fixture(autouse=True)
def three_entries(tmp_path, monkeypatch):
    """Two models, three entries; the last is ten days old. And a converted model beside them."""
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    flat = {"logprobs": torch.zeros(5), "entropy": torch.ones(5)}
    store("a" * 32, flat, [2, 3], model="org/first", dtype="float32")
    store("b" * 32, flat | {"states": torch.zeros(5, 4)}, [2, 3], model=str(converted_model()), dtype="bfloat16")
    store("c" * 32, flat, [5], model="org/first", dtype="float32")
    for entry in entries():
        if entry.files[0].name[0] == "c":
            os.utime(entry.files[0], (0, time.time() - 10 * 86400))
    converted_model().mkdir()
    (converted_model() / "config.json").write_text("{}")


def left() -> str:
    return "".join(sorted(entry.files[0].name[0] for entry in entries()))


def test_it_lists_by_model_and_deletes_nothing(capsys):
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    rows = shown[shown.index("model  ") :].splitlines()
    assert max(map(len, rows[:8])) <= 80
    first = next(i for i, line in enumerate(rows) if "org/first" in line)
    day = time.strftime("%Y-%m-%d", time.localtime(time.time() - 10 * 86400))
    assert rows[first].split() == ["org/first", "float32", "no", "2", "3", "0.0", day, "to"]
    assert rows[first + 1].split() == [time.strftime("%Y-%m-%d")]
    second = next(i for i, line in enumerate(rows) if "bfloat16" in line)
    assert "".join(row.split()[0] for row in rows[second : second + 3]) == EMBEDDED_MODEL  # folded, not cut
    assert rows[second].split()[1:5] == ["bfloat16", "yes", "1", "2"]
    assert f"{EMBEDDED_MODEL}, converted" in shown and left() == "abc"


@pytest.mark.parametrize(
    "flags, remaining",
    [
        ([], ""),
        (["--model_name_or_path", "first"], "b"),
        (["--model_name_or_path", EMBEDDED_MODEL], "ac"),
        (["--older_than_days", "5"], "ab"),
        (["--older_than_days", "5", "--model_name_or_path", "SmolLM2"], "abc"),
        (["--model_name_or_path", "nobody"], "abc"),
    ],
)
def test_it_clears_what_was_asked_for_and_never_the_model(capsys, flags, remaining):
    assert main(["cache", "--clear", "true", *flags]) == 0
    assert left() == remaining and (converted_model() / "config.json").exists()
    assert f"{3 - len(remaining)} entries deleted" in capsys.readouterr().out


def test_the_converted_model_goes_when_asked_for(capsys):
    assert main(["cache", "--embedded_model", "true"]) == 0 and converted_model().exists()
    assert main(["cache", "--clear", "true", "--embedded_model", "true"]) == 0
    assert not converted_model().exists()


def test_an_empty_cache_and_a_bad_age_are_told(capsys, tmp_path, monkeypatch):
    assert main(["cache", "--older_than_days", "-1"]) == 2
    assert "must not be negative" in capsys.readouterr().err
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path / "none"))
    assert main(["cache", "--clear", "true"]) == 0
    assert "No such entries" in capsys.readouterr().out and not (tmp_path / "none").exists()
