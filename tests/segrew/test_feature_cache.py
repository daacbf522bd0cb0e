"""The feature cache on disk: Arrow inside, nothing stale or damaged ever read, and no damage fatal."""

import os
import time

import pyarrow as pa
import pytest
import torch

from segrew import feature_cache
from segrew.feature_cache import entries, features_directory, key_of, load, store

LENGTHS = [3, 0, 2]
FLAT = {
    "logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]),
    "entropy": torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5]),
}
STATES = torch.arange(20, dtype=torch.bfloat16).reshape(5, 4)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path / "cache"))


def keep(key: str = "k" * 32, model: str = "org/model", **more) -> None:
    store(key, FLAT | more, LENGTHS, model=model, dtype="float32")


def test_an_entry_comes_back_bit_for_bit():
    keep(states=STATES)
    found = load("k" * 32, LENGTHS, with_states=True)
    for name, value in (FLAT | {"states": STATES}).items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    assert load("k" * 32, LENGTHS, with_states=False).keys() == {"logprobs", "entropy"}


def test_other_readers_of_arrow_find_a_row_per_response():
    keep()
    with pa.OSFile(str(features_directory() / ("k" * 32 + ".arrow"))) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["entropy"].to_pylist() == [[0.5, 1.5, 2.5], [], [3.5, 4.5]]
    assert table["logprobs"].to_pylist()[2] == [-4.0, -5.0]
    assert table.schema.metadata[b"model"] == b"org/model" and table.schema.metadata[b"dtype"] == b"float32"


def test_what_is_not_there_is_none():
    assert load("k" * 32, LENGTHS, with_states=False) is None
    keep()
    assert load("k" * 32, LENGTHS, with_states=True) is None  # entropies are, states are not
    assert load("j" * 32, LENGTHS, with_states=False) is None


def test_a_key_tells_models_and_tokens_apart():
    base = ("model float32", [[1, 2]], [[3]])
    others = [
        ("model bfloat16", [[1, 2]], [[3]]),
        ("other float32", [[1, 2]], [[3]]),
        ("model float32", [[1]], [[2, 3]]),
        ("model float32", [[1, 2]], [[4]]),
        ("model float32", [[1, 2], [1, 2]], [[3], [3]]),
    ]
    assert len({key_of(*key) for key in [base, *others]}) == 6 and key_of(*base) == key_of(*base)


def damaged(path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other bytes":
        path.write_bytes(b"not what it was " * 40)
    else:  # a bit somewhere in the numbers: the file is sound, its content is not
        numbers = (
            FLAT["entropy"].numpy().tobytes()
            if path.suffix == ".arrow"
            else STATES[1:2].view(torch.int16).numpy().tobytes()
        )
        place = bytes(content).index(numbers)
        content[place + 1] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".arrow", ".safetensors"])
@pytest.mark.parametrize("how", ["cut off", "empty", "other bytes", "a bit"])
def test_a_damaged_file_is_told_and_not_read(suffix, how):
    keep(states=STATES)
    path = features_directory() / ("k" * 32 + suffix)
    damaged(path, how)
    with pytest.warns(UserWarning, match=f"{suffix[1:]} is damaged .*computed anew"):
        assert load("k" * 32, LENGTHS, with_states=True) is None
    assert len(entries()) == 1  # listed all the same
    keep(states=STATES)
    assert torch.equal(load("k" * 32, LENGTHS, with_states=True)["states"], STATES)


def test_an_entry_under_another_key_or_of_other_lengths_is_not_read():
    keep()
    os.rename(features_directory() / ("k" * 32 + ".arrow"), features_directory() / ("j" * 32 + ".arrow"))
    with pytest.warns(UserWarning, match="damaged"):
        assert load("j" * 32, LENGTHS, with_states=False) is None
    keep()
    with pytest.warns(UserWarning, match="damaged"):
        assert load("k" * 32, [3, 1, 1], with_states=False) is None


def test_entries_say_what_they_hold(monkeypatch):
    assert entries() == []
    keep("a" * 32)
    keep("b" * 32, model="", states=STATES)
    for name in ("a" * 32 + ".arrow", "c" * 32 + ".arrow.77", "d" * 32 + ".safetensors.78"):
        (features_directory() / name).touch()
    os.utime(features_directory() / ("c" * 32 + ".arrow.77"), (0, time.time() - 2 * 3600))  # left by a run that died
    by_name = {entry.files[0].name[0]: entry for entry in entries()}
    assert by_name.keys() == {"a", "b", "c"}
    assert by_name["a"].model == "org/model" and by_name["a"].rows == 3 and not by_name["a"].has_states
    assert by_name["b"].model == "" and by_name["b"].has_states and len(by_name["b"].files) == 2
    assert by_name["b"].size == sum(file.stat().st_size for file in by_name["b"].files)
    assert abs(by_name["a"].written - time.time()) < 100
    by_name["b"].delete()
    assert {entry.files[0].name[0] for entry in entries()} == {"a", "c"}


def test_a_write_that_fails_leaves_no_entry(monkeypatch):
    monkeypatch.setattr(feature_cache.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        keep()
    assert load("k" * 32, LENGTHS, with_states=False) is None and entries() == []
