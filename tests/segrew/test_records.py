"""Reading rows: one content in every dress, errors with file and line, directories with splits, and the hub's form."""

import csv
import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from segrew.data_options import DataOptions
from segrew.records import _read_hub, read_records, records_of, splits_of

SKIP = DataOptions(bad_rows="skip")
ROWS = [{"prompt": "x", "chosen": "ä", "rejected": "b\u2028c"}, {"prompt": "y", "chosen": "c", "rejected": "d"}]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
CLEAN = b"\n".join(LINES) + b"\n"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", CLEAN),
        ("a.jsonl.gz", gzip.compress(CLEAN)),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("b14.jsonl", b"\xef\xbb\xbf" + LINES[0] + b"\r\n\r\n" + LINES[1]),
        ("gap.jsonl", b"\n\n" + LINES[0] + b"\n   \n" + LINES[1] + b"\n\n"),
    ],
)
def test_b14_one_content_in_every_dress(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert [record for _, record in read_records(path)] == ROWS


def test_b14_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES[0] + b"\r\n\r\n" + LINES[1])
    assert [where for where, _ in read_records(path)] == [f"{path}, line 1", f"{path}, line 3"]


@pytest.mark.parametrize(
    "content, message",
    [
        (LINES[0] + b'\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        (CLEAN.decode().encode("utf-16"), "line 1: not UTF-8"),
        (CLEAN + b'{"prompt": "x", "cho', "line 3: not valid JSON"),
        (CLEAN + b'{"prompt": "x",\r\n', r"line 3: not valid JSON \(.* at column 1[56]\)"),
        (CLEAN + b"[]\n", "line 3: expected a JSON object, found list"),
        (CLEAN + b"3\n", "line 3: expected a JSON object, found int"),
    ],
)
def test_b14_bad_bytes_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        list(read_records(path))


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[1, ", b"\xff", b"[1]"])
def test_a_json_file_is_a_list_of_objects(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        list(read_records(path))


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_parquet_and_csv_hold_the_same_rows(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    assert [record for _, record in read_records(tmp_path / "a.parquet")] == ROWS
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "chosen", "rejected"])
        writer.writeheader()
        writer.writerows(ROWS)
    found = list(read_records(tmp_path / "a.csv"))
    assert [record for _, record in found] == ROWS
    assert [where for where, _ in found] == [f"{tmp_path / 'a.csv'}, line 2", f"{tmp_path / 'a.csv'}, line 3"]


def test_csv_cells_of_several_lines_messages_ids_and_nothing(tmp_path):
    turns = [{"role": "user", "content": 'a, "b"\n[c]'}]
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "chosen", "chosen_ids"], [json.dumps(turns), "[1, 2] are\nnumbers", "[1, 2]"]])
        writer.writerow(["[3]", "", ""])
    (_, first), (where, second) = read_records(tmp_path / "a.csv")
    assert first == {"prompt": turns, "chosen": "[1, 2] are\nnumbers", "chosen_ids": [1, 2]}
    assert second == {"prompt": "[3]", "chosen": None, "chosen_ids": None} and where.endswith("line 4")


@pytest.mark.parametrize("content, message", [
    (b"a,b\n1,2\n1\n", "line 3: more or fewer cells than the 2 named columns"),
    (b"a,b\n1,2,3\n", "line 2: more or fewer cells"),
    (b"a,b\n1,\xff\n", "line 2: not UTF-8"),
])  # fmt: skip
def test_b14_a_malformed_csv_names_its_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.csv, {message}"):
        list(read_records(tmp_path / "a.csv"))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        list(read_records(tmp_path / "a.parquet"))


def test_b14_unreadable_lines_are_counted_where_they_are_skipped(tmp_path):
    path, skipped = tmp_path / "a.jsonl", Counter()
    path.write_bytes(LINES[0] + b'\n{"prompt": "\xff"}\n[]\n{"x\n' + LINES[1])
    assert [record for _, record in read_records(path, SKIP, skipped)] == ROWS
    assert skipped == {"unreadable line": 3}
    with pytest.raises(ValueError, match=r"line 2: not UTF-8.*\(--bad_rows skip leaves such lines out\)"):
        list(read_records(path))


def test_half_a_character_names_its_line_and_whole_ones_are_read(tmp_path):
    whole, half = '{"text": "\\ud83d\\ude00 \\\\ud83d"}', '{"text": ["cut \\ud83d"]}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{whole}\n{half}\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: holds '\\ud83d', half of a character"):
        list(read_records(path))
    skipped = Counter()
    assert [row for _, row in read_records(path, SKIP, skipped)] == [{"text": "\U0001f600 \\ud83d"}]
    assert skipped == {"unreadable line": 1}
    (tmp_path / "rows.json").write_text(f"[{whole}, {half}]")
    with pytest.raises(ValueError, match=r"rows\.json, item 2: holds"):
        list(read_records(tmp_path / "rows.json"))


def test_b43_a_line_beyond_the_limit_is_an_error_or_counted(tmp_path):
    path, skipped, limit = tmp_path / "a.jsonl", Counter(), len(LINES[0]) + 1
    long = json.dumps({"prompt": "a" * 200}).encode()
    path.write_bytes(LINES[0] + b"\n" + long + b"\n" + LINES[1] + b"\n")
    with pytest.raises(
        ValueError, match=rf"a\.jsonl, line 2: {len(long) + 1} bytes, more than --max_line_bytes {limit}"
    ):
        list(read_records(path, DataOptions(max_line_bytes=limit)))
    options = DataOptions(max_line_bytes=limit, bad_rows="skip")
    assert [record for _, record in read_records(path, options, skipped)] == ROWS
    assert skipped == {"unreadable line": 1}


def test_a_directory_is_read_file_by_file(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": name}))
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    assert [record["name"] for _, record in records_of(str(tmp_path))] == ["a", "b"] and not splits_of(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no \.jsonl, \.json, \.csv .* or \.parquet file in this directory"):
        list(records_of(str(tmp_path / "empty")))


@pytest.mark.parametrize("layout", ["{}.parquet", "data/{}-00000-of-00001.parquet", "{}/part.parquet"])
def test_a_directory_as_the_hub_lays_it_out_has_splits(tmp_path, layout):
    for split in ("train", "test"):
        path = tmp_path / layout.format(split)
        path.parent.mkdir(exist_ok=True)
        write_parquet(path, [{"split": split}])
    assert splits_of(tmp_path) == {"train", "test"}
    for split in ("train", "test"):
        assert [record for _, record in records_of(str(tmp_path), split)] == [{"split": split}]
    with pytest.raises(ValueError, match=r"no split 'validation' in this directory \(there are: test, train\)"):
        list(records_of(str(tmp_path), "validation"))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hub_s_own_loader_gives_the_same_rows(tmp_path, streaming, cache, monkeypatch):
    """`datasets.load_dataset` takes a local folder of the hub's form, so the path to the hub runs without a network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache / "datasets")
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS)
    found = list(_read_hub(str(tmp_path), "train", None, streaming))
    assert [record for _, record in found] == ROWS
    assert found[1][0] == f"{tmp_path} [train], row 2"


def test_a_name_that_is_neither_file_nor_data_set_is_said_so():
    with pytest.raises(ValueError, match="'nobody/nothing' is no local file"):
        list(records_of("nobody/nothing"))


def test_a_problem_directory_is_a_row(tmp_path):
    for name, files in {
        "0002": {"question.txt": "Add.", "starter_code.py": "def add(", "metadata.json": '{"difficulty": "interview"}'},
        "0001": {"question.txt": "Sum.", "input_output.json": '{"inputs": ["1"], "outputs": ["1"]}'},
    }.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / "train" / name / file).write_text(text)
    first, second = (record for _, record in records_of(str(tmp_path), "train"))
    assert first == {"problem_id": 1, "question": "Sum.", "starter_code": "",
                     "input_output": '{"inputs": ["1"], "outputs": ["1"]}'}  # fmt: skip
    assert second == {"problem_id": 2, "question": "Add.", "starter_code": "def add(", "input_output": "",
                      "difficulty": "interview"}  # fmt: skip
