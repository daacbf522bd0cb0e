"""Rows of data sets with the place that each came from: files of five kinds, directories, and the hub."""

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from segrew.data_options import DataOptions

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]

EMBEDDED_PAIRS = "everyday"
UNREADABLE = "unreadable line"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "filtered", "raw")
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # what `datasets` leaves
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def _open_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: not a readable gzip file ({error}).") from None


def _text_of(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; convert the file to UTF-8.") from None


def _require_characters(record: Any, where: str) -> None:
    """Refuse half a character, such as \\ud83d alone: JSON can spell it, and nothing can encode it."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: holds {error.object[error.start]!a}, half of a character whose other half is cut off; "
            "mend the text or leave the row out."
        ) from None


def _object_of(line: bytes, where: str, limit: int | None) -> Record:
    """Parse one line of a .jsonl file."""
    if limit is not None and len(line) > limit:
        raise ValueError(f"{where}: {len(line)} bytes, more than --max_line_bytes {limit}.")
    try:
        record = json.loads(_text_of(line.rstrip(b"\r\n"), where))  # its end would count as column 1 of a next line
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}.")
    if _ESCAPED_HALF.search(line):
        _require_characters(record, where)
    return record


def _read_lines(path: Path, options: DataOptions, skipped: Counter) -> Records:
    for number, line in _open_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = _object_of(line, where, options.max_line_bytes)
        except ValueError as error:
            if options.bad_rows == "error":
                raise ValueError(f"{error} (--bad_rows skip leaves such lines out)") from None
            skipped[UNREADABLE] += 1
            continue
        yield where, record


def _read_list(path: Path, options: DataOptions, skipped: Counter) -> Records:
    content = b"".join(line for _, line in _open_lines(path))
    try:
        records = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path}: expected a non-empty JSON list of objects.")
    halves = _ESCAPED_HALF.search(content) is not None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, item {number}: expected a JSON object, found {type(record).__name__}.")
        if halves:
            _require_characters(record, f"{path}, item {number}")
        yield f"{path}, item {number}", record


def _cell(column: str, text: str) -> Any:
    """Read a CSV cell: nothing is None; lists of messages, and of ids in a column named so, are JSON."""
    if text[:1] == "[":
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return text
        if column.endswith("_ids") or (value and all(isinstance(item, dict) for item in value)):
            return value
    return text or None


def _read_csv(path: Path, options: DataOptions, skipped: Counter) -> Records:
    csv.field_size_limit(1 << 30)
    rows = csv.DictReader(_text_of(line, f"{path}, line {number}") for number, line in _open_lines(path))
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{where}: more or fewer cells than the {len(rows.fieldnames or ())} named columns.")
            yield where, {column: _cell(column, text) for column, text in row.items()}
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: not valid CSV ({error}).") from None


def _read_parquet(path: Path, options: DataOptions, skipped: Counter) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]}).") from None


READERS: dict[str, Callable[[Path, DataOptions, Counter], Records]] = {
    ".jsonl": _read_lines,
    ".json": _read_list,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _reader_of(path: Path) -> Callable[[Path, DataOptions, Counter], Records] | None:
    return READERS.get(Path(path.name.removesuffix(".gz")).suffix)


def read_records(path: str | Path, options: DataOptions | None = None, skipped: Counter | None = None) -> Records:
    """Yield ("file, line n", record) from a .jsonl, .json (a list), .csv or .parquet file; .gz of all but the last.

    Args:
        skipped: counts what `--bad_rows skip` leaves out.

    Raises:
        ValueError: the file is missing, empty or malformed; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    count = 0
    reader = _reader_of(path) or _read_lines
    for found in reader(path, options or DataOptions(), Counter() if skipped is None else skipped):
        count += 1
        yield found
    if count == 0 and not skipped:
        raise ValueError(f"{path}: the file holds no rows.")


def _split_of(path: Path) -> str | None:
    """Name the split that a file is called after, as in train.jsonl or test_prefs-00000-of-00001.parquet."""
    stem = re.split(r"[-.]", path.name)[0]
    return stem if stem.split("_")[0] in _SPLITS else None


def splits_of(name_or_path: str | Path) -> set[str]:
    """Return the splits of a local directory: folders or files called after one."""
    root = Path(name_or_path)
    named = {path.name for path in root.iterdir() if path.is_dir()} & set(_SPLITS) if root.is_dir() else set()
    return named or {split for path in _data_files(root) if (split := _split_of(path))}


def _data_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if _reader_of(p) and p.name not in _NO_ROWS and p.name[0] != ".")


def _read_directory(root: Path, split: str, options: DataOptions, skipped: Counter) -> Records:
    """Read the files of a split, or every file where none is called after a split."""
    splits = splits_of(root)
    if splits and split not in splits:
        raise ValueError(f"{root}: no split '{split}' in this directory (there are: {', '.join(sorted(splits))}).")
    inside = root / split if (root / split).is_dir() else root
    if any(inside.glob("*/question.txt")):
        yield from _read_problems(inside)
        return
    found = [path for path in _data_files(inside) if inside != root or not splits or _split_of(path) == split]
    if not found:
        raise ValueError(f"{root}: no .jsonl, .json, .csv (or these with .gz) or .parquet file in this directory.")
    for path in found:
        yield from read_records(path, options, skipped)


def _read_problems(root: Path) -> Records:
    """Read programming problems as APPS lays them out: a directory each, a file for each column."""
    for question in sorted(root.glob("*/question.txt")):
        problem = question.parent
        number = int(problem.name) if problem.name.isdigit() else problem.name
        record: Record = {"problem_id": number, "starter_code": "", "input_output": ""}
        for path in sorted(problem.iterdir()):
            if path.name in ("question.txt", "input_output.json", "solutions.json", "starter_code.py"):
                record[path.stem] = _text_of(path.read_bytes(), str(path))
        if (problem / "metadata.json").is_file():
            record |= _object_of((problem / "metadata.json").read_bytes(), str(problem / "metadata.json"), None)
        yield str(problem), record


def _read_embedded(split: str) -> Records:
    source = files("segrew") / "data" / "everyday_pairs.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    if split not in {row["split"] for row in rows}:
        raise ValueError(f"the embedded pairs have the splits 'train' and 'test', not '{split}'.")
    for row in rows:
        if row["split"] == split:
            yield f"the embedded pairs, {row['id']}", {**row, "subset": row["category"]}


def _read_hub(name: str, split: str, config: str | None, streaming: bool) -> Records:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the hub's errors are many; each means that the set cannot be had
        raise ValueError(f"'{name}' is no local file, and the hub gives no such data set: {error}") from None
    for number, row in enumerate(rows, 1):
        yield f"{name} [{split}], row {number}", row


def records_of(
    name_or_path: str, split: str = "train", options: DataOptions | None = None, skipped: Counter | None = None
) -> Records:
    """Yield records from the embedded set, a local file, a directory of files, or a data set of the hub.

    Raises:
        ValueError: there is no such data set, or it is malformed; the message names file and line.
    """
    path, options = Path(name_or_path), options or DataOptions()
    skipped = Counter() if skipped is None else skipped
    if name_or_path == EMBEDDED_PAIRS:
        yield from _read_embedded(split)
    elif path.is_dir():
        yield from _read_directory(path, split, options, skipped)
    elif path.is_file() or _reader_of(path):
        yield from read_records(path, options, skipped)
    else:
        yield from _read_hub(name_or_path, split, options.dataset_config, options.streaming)
