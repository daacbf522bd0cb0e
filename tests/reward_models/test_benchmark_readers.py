"""Every benchmark's own record format, and what is said of a row that is not in it."""

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from reward_models.benchmark_readers import (
    judgebench_item,
    list_item,
    marked_item,
    pair_item,
    read_items,
    read_prior_sets,
    rewardbench_item,
)
from segrew.preferences import Fault


@pytest.fixture
def file(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def items_of(path, read, split="train"):
    return read_items(path, split, read)[0]


def test_judgebench_puts_the_better_response_first(file):
    raw = {"question": "q", "response_A": "a", "response_B": "b", "response_model": "m"}
    path = file(
        raw | {"pair_id": "1", "source": "mmlu-pro-law", "label": "A>B"},
        raw | {"pair_id": "2", "source": "livecodebench", "label": "B>A"},
        {"id": 3, "prompt": "q", "chosen": "c", "rejected": "r", "subset": "judgebench-math"},
    )
    items = items_of(path, judgebench_item)
    assert [(i.id, i.subset, i.answers) for i in items] == [
        ("1", "knowledge", ["a", "b"]), ("2", "coding", ["b", "a"]), ("3", "math", ["c", "r"]),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"line 1: label is 'A=B'"):
        items_of(file(raw | {"pair_id": "1", "source": "x", "label": "A=B"}), judgebench_item)
    with pytest.raises(ValueError, match="line 1: lacks label, source"):
        items_of(file(raw), judgebench_item)


def test_lists_of_answers_keep_the_better_ones_first(file):
    row = {"id": "ref:0", "prompt": "q", "chosen": ["a", "b"], "rejected": ["c"], "subset": "Ties", "num_correct": 2}
    (item,) = items_of(file(row), partial(list_item, subset="subset"))
    assert (item.id, item.subset, item.answers, item.correct) == ("ref:0", "Ties", ["a", "b", "c"], 2)
    (item,) = items_of(file(row | {"domain": "chat"}), partial(list_item, subset="domain"))
    assert item.subset == "chat"


def test_rows_that_cannot_be_scored_are_counted(file):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = file(pair, pair | {"rejected": " "}, pair | {"rejected": "a"})
    items, (source,) = read_items(path, "", pair_item)
    assert [item.answers for item in items] == [["a", "b"]]
    assert (source.rows, source.used, source.skipped) == (3, 1, {"empty answer": 1, "identical answers": 1})


def test_rewardbenchs_rows_count_with_equal_answers_too(file):
    (item,) = items_of(file({"prompt": "q", "chosen": "a", "rejected": "a", "subset": "hep-go"}), rewardbench_item)
    assert item.answers == ["a", "a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_correct": 3}, "line 1: num_correct is 3 but 'chosen' holds 2"),
        ({"chosen": "a"}, "line 1: 'chosen' is no list"),
        ({"rejected": []}, "line 1: 'rejected' is no list"),
        ({"rejected": [" "]}, r"0 of 1 rows are usable rows \(1 empty answer\)"),
        ({"subset": None}, "line 1: lacks subset"),
    ],
)
def test_what_is_no_list_row_is_refused(file, change, message):
    row = {"id": 1, "prompt": "q", "chosen": ["a", "b"], "rejected": ["c"], "subset": "Math"}
    with pytest.raises(ValueError, match=message):
        items_of(file(row | change), partial(list_item, subset="subset"))


def test_spans_are_read_by_either_name(file):
    path = file(
        {"id": 1, "prompt": "q", "response": "abcdef", "spans": [{"start": 1, "end": 3, "type": "x"}]},
        {"id": 2, "prompt": "q", "chosen": "c", "rejected": "abc", "faults": [{"start": 0, "end": 1, "kind": "y"}]},
        {"id": 3, "prompt": "q", "response": "fine"},
        {"id": 4, "prompt": [{"role": "user", "content": "q"}], "chosen": [{"role": "assistant", "content": "c"}],
         "rejected": [{"role": "assistant", "content": "abc"}], "faults": [{"start": 1, "end": 2, "kind": "z"}]},
    )  # fmt: skip
    items = items_of(path, marked_item)
    assert all(item.prompt == [{"role": "user", "content": "q"}] for item in items)
    assert [(item.answers, item.spans) for item in items] == [
        (["abcdef"], (Fault(1, 3, "x"),)), (["abc"], (Fault(0, 1, "y"),)), (["fine"], ()),
        (["abc"], (Fault(1, 2, "z"),)),
    ]  # fmt: skip
    for bad in ([{"start": 2, "end": 99, "kind": "x"}], [{"start": 2}], "x"):
        with pytest.raises(ValueError, match="line 1: 'spans' needs objects"):
            items_of(file({"prompt": "q", "response": "abc", "spans": bad}), marked_item)


def test_the_embedded_faults_are_marked_answers():
    items = items_of("everyday", marked_item, "test")
    assert all(item.spans and len(item.answers) == 1 for item in items)
    assert all(item.answers[0][s.start : s.end].strip() for item in items for s in item.spans)


def test_prior_sets_are_named_by_their_rows_or_by_the_hubs_splits(file, monkeypatch):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    items, _ = read_prior_sets(file(pair | {"subset": "shp"}, pair | {"subset": "summarize"}))
    assert [item.subset for item in items] == ["shp", "summarize"]
    with pytest.raises(ValueError, match="hep-go is none of the prior sets"):
        read_prior_sets(file(pair | {"subset": "hep-go"}))
    asked = []

    def hub(name, split, *_):
        asked.append((name, split))
        yield "hub, row 1", pair

    monkeypatch.setattr("segrew.sources.records_of", hub)
    items, _ = read_prior_sets("allenai/pref-test-sets")
    assert [item.subset for item in items] == ["anthropic_helpful", "anthropic_hhh", "shp", "summarize"]
    assert asked == [("allenai/pref-test-sets", item.subset) for item in items]


DATA = Path(os.environ.get("SEGREW_TEST_DATA", "/nowhere"))


@pytest.mark.skipif(not (DATA / "rmbench").is_dir(), reason="SEGREW_TEST_DATA names no folder with the real files")
def test_real_files_are_read_whole():
    def subsets(items):
        return Counter(item.subset for item in items)

    bench = subsets(items_of(str(DATA / "rewardbench/rewardbench_v1_rebuilt.jsonl.gz"), rewardbench_item))
    assert bench["math-prm"] == 313 and bench.total() == 1994
    styles = items_of(str(DATA / "rmbench/rmbench_chat_code_safety.jsonl.gz"), partial(list_item, subset="domain"))
    assert subsets(styles) == {"safety-refuse": 184, "code": 152, "safety-response": 105, "chat": 89}
    assert {(len(item.answers), item.correct) for item in styles} == {(6, 3)}
    judge = str(DATA / "judgebench/judgebench_pairs.jsonl.gz")
    assert subsets(items_of(judge, judgebench_item)) == {"knowledge": 222, "reasoning": 95, "math": 67, "coding": 46}
    raw = {item.id: item for item in items_of(str(DATA / "raw/judgebench.jsonl.gz"), judgebench_item)}
    assert all(raw[item.id].answers == item.answers for item in items_of(judge, judgebench_item))
    marked = items_of(str(DATA / "prefs/finegrained_qa_dev_spans.jsonl.gz"), marked_item)
    assert len(marked) == 350 and sum(bool(item.spans) for item in marked) == 325
    assert len(items_of(str(DATA / "prefs/hhh_alignment.jsonl.gz"), pair_item)) == 160
