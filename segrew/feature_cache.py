"""What frozen models said of responses, on disk: an Arrow file per chunk of rows, hidden states beside it.

An entry is two files under one key: KEY.arrow has a row per response with its log-probabilities and entropies,
KEY.safetensors the hidden states, where they were asked for. Both carry a checksum.
"""

import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from segrew.embedded_model import EMBEDDED_MODEL, cache_directory, converted_model

COLUMNS = ("logprobs", "entropy")
_UNFINISHED_SECONDS = 3600  # a file still being written is younger


def features_directory() -> Path:
    """Return where entries are."""
    return cache_directory() / "features"


def key_of(identity: str, prompts: list[list[int]], responses: list[list[int]]) -> str:
    """Name an entry by what its numbers depend on: the model with dtype and settings, and every token id."""
    digest = hashlib.sha256(f"features 3 {identity}".encode())
    for prompt, response in zip(prompts, responses, strict=True):
        digest.update(repr((prompt, response)).encode())
    return digest.hexdigest()[:32]


def _checksum(*tensors: Tensor) -> str:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    write(unfinished)
    os.replace(unfinished, path)


def store(key: str, flat: dict[str, Tensor], lengths: list[int], *, model: str, dtype: str) -> None:
    """Write an entry, each of its files at once.

    Args:
        flat: `logprobs` and `entropy` (and `states`) of all real tokens, row after row.
        model: name of the model, for people.
    """
    directory = features_directory()
    directory.mkdir(parents=True, exist_ok=True)
    if "states" in flat:
        states = {"states": flat["states"].contiguous()}
        metadata = {"checksum": _checksum(states["states"])}
        _write(directory / f"{key}.safetensors", lambda path: save_file(states, path, metadata))
    offsets = pa.array([0, *accumulate(lengths)], pa.int32())
    columns = [pa.ListArray.from_arrays(offsets, pa.array(flat[name].numpy())) for name in COLUMNS]
    metadata = {"key": key, "model": model, "dtype": dtype, "checksum": _checksum(*(flat[name] for name in COLUMNS))}
    table = pa.table(columns, names=list(COLUMNS)).replace_schema_metadata(metadata)

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    _write(directory / f"{key}.arrow", write)


def _read_columns(path: Path, key: str, lengths: list[int]) -> dict[str, Tensor]:
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
        table, metadata = reader.read_all(), _metadata(reader.schema)
    flat = {}
    for name in COLUMNS:
        column = table[name].combine_chunks()
        if column.value_lengths().to_pylist() != lengths:
            raise ValueError("its rows have other lengths")
        flat[name] = torch.from_numpy(column.flatten().to_numpy().copy())
    if metadata.get("key") != key or metadata.get("checksum") != _checksum(*flat.values()):
        raise ValueError("its checksum does not hold")
    return flat


def _read_states(path: Path) -> Tensor:
    with safe_open(path, "pt") as file:
        states, metadata = file.get_tensor("states"), file.metadata() or {}
    if metadata.get("checksum") != _checksum(states):
        raise ValueError("its checksum does not hold")
    return states


def load(key: str, lengths: list[int], *, with_states: bool) -> dict[str, Tensor] | None:
    """Read an entry; None where there is none, or where a file is damaged, which is said."""
    columns, states = (features_directory() / f"{key}.{suffix}" for suffix in ("arrow", "safetensors"))
    if not columns.exists() or (with_states and not states.exists()):
        return None
    path = columns
    try:
        flat = _read_columns(columns, key, lengths)
        if with_states:
            path = states
            flat["states"] = _read_states(states)
        return flat
    except (pa.ArrowException, SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        warnings.warn(f"{path} is damaged ({str(error).splitlines()[0]}); it is computed anew.", stacklevel=2)
        return None


def _metadata(schema: pa.Schema) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}


@dataclass(frozen=True)
class Entry:
    """One entry of the cache.

    Args:
        model, dtype: "" where the entry does not say.
        rows: responses in it. size: bytes of all its files. written: seconds since the epoch.
    """

    files: tuple[Path, ...]
    model: str
    dtype: str
    rows: int
    size: int
    written: float

    @property
    def has_states(self) -> bool:
        """Whether hidden states are kept."""
        return any(file.suffix == ".safetensors" for file in self.files)

    def delete(self) -> None:
        """Remove its files."""
        for file in self.files:
            file.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """List the cache, newest first; files that another process may be writing are left out."""
    files_of: dict[str, list[Path]] = {}
    for file in sorted(features_directory().glob("*")):
        finished = file.suffix in (".arrow", ".safetensors")
        if file.is_file() and (finished or time.time() - file.stat().st_mtime > _UNFINISHED_SECONDS):
            files_of.setdefault(file.name.split(".")[0], []).append(file)
    return sorted(map(_entry, files_of.values()), key=lambda entry: -entry.written)


def _entry(files: list[Path]) -> Entry:
    facts, rows = {}, 0
    for file in files:
        if file.suffix == ".arrow":
            try:
                with pa.OSFile(str(file), "rb") as source, pa.ipc.open_file(source) as reader:
                    facts = _metadata(reader.schema)
                    rows = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
            except (pa.ArrowException, OSError):
                pass  # damaged: listed by its size, and computed anew when asked for
    stats = [file.stat() for file in files]
    return Entry(
        files=tuple(files),
        model=EMBEDDED_MODEL if facts.get("model") == str(converted_model()) else facts.get("model", ""),
        dtype=facts.get("dtype", ""),
        rows=rows,
        size=sum(stat.st_size for stat in stats),
        written=max(stat.st_mtime for stat in stats),
    )
