"""`segrew data` as its user sees it: the type, the counts, the lengths, and one example with mask and units."""

import itertools
import json
import re

import pytest

from segrew.cli import main
from segrew.preferences import load_preferences
from segrew.records import read_records


@pytest.fixture
def data(tmp_path, tiny_dir, capsys, monkeypatch):
    """Write rows to a file and return what the command prints, wide enough for no line to wrap."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(rows, *flags, code=0):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ["data", "--model_name_or_path", str(tiny_dir), "--dataset_name", str(path), *flags]
        assert main(argv) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return run


GOOD = {"prompt": "What is up?", "chosen": "All is well today.", "rejected": "No."}
ROWS = [GOOD, GOOD | {"prompt": "And now?", "margin": 1.0}, GOOD | {"rejected": ""}, GOOD | {"rejected": "\n"}]


def test_type_and_counts_by_reason(data):
    shown = data(ROWS, "--rule", "token")
    assert "Usable pairs: 2" in shown and "(preference, explicit prompt, standard)" in shown
    assert "2 left out: empty answer" in shown
    assert '"The longer answer is the better one" holds in 100.0%; 1 with a margin' in shown


def test_length_quantiles_are_those_of_the_tokens(data, tiny_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    texts = ["a", "b b", "c c c", "d d d d d d d d"]
    shown = data([{"prompt": "x", "chosen": text, "rejected": "no"} for text in texts], "--rule", "token")
    sizes = sorted(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts)
    least, median, *_, most = map(int, re.search(r"chosen\s*│(.*)│", shown)[1].replace("│", " ").split())
    assert (least, most) == (sizes[0], sizes[-1]) and median in sizes[1:3]


@pytest.mark.parametrize("rule, units", [("token", None), ("response", 1), ("sentence", 1), ("random_ngram", None)])
def test_the_example_shows_prompt_mask_and_units_that_rebuild_the_answer(data, rule, units):
    shown = data(ROWS, "--rule", rule)
    table = shown[shown.index("\nchosen ") : shown.index("\nrejected ")]
    rows = [[cell.strip("│ ") for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    prompt, *parts = rows
    assert prompt[1] == "0" and "What is up?" in prompt[3]
    assert all(row[1] == "1" for row in parts) and [int(row[2]) for row in parts] == list(range(len(parts)))
    texts = [line.split("│")[4][1:-1].rstrip() for line in table.splitlines() if line.startswith("│")][1:]
    assert "".join(text.replace(" ", "") for text in texts) == "Alliswelltoday.<|im_end|>"
    assert units is None or len(parts) == units
    columns = [list(map(int, row[0].split("-"))) for row in rows]
    assert all(left[-1] + 1 == right[0] for left, right in itertools.pairwise(columns))


def test_what_the_maximum_length_does_is_counted(data):
    rows = [GOOD, GOOD | {"chosen": "well " * 60}]
    assert "1 pairs with answer cut to --max_length" in data(rows, "--rule", "token", "--max_length", "48")
    shown = data(rows, "--rule", "token", "--max_length", "48", "--overlong", "drop")
    assert "Usable pairs: 1" in shown and "1 pairs left out: longer than --max_length" in shown
    assert "line 2: " in data(rows, "--rule", "token", "--max_length", "48", "--overlong", "error", code=2)


def test_stages_are_counted_and_one_can_be_written(data, tmp_path):
    rows = [GOOD | {"prompt": f"question {i}"} for i in range(40)]
    shown = data(rows, "--rule", "token", "--stage_split", "20,40,40")
    counts = {name: int(count) for name, count in re.findall(r"(sft|reward|ppo) (\d+)", shown)}
    assert sum(counts.values()) == 40
    out = tmp_path / "sft.jsonl"
    flags = ["--rule", "token", "--stage_split", "20,40,40", "--stage", "sft", "--output_file", str(out)]
    assert f"{counts['sft']} pairs written to {out}" in data(rows, *flags)
    assert len(load_preferences(str(out)).pairs) == counts["sft"]
    assert "exists; name another file" in data(rows, *flags, code=2)


def test_what_is_written_reads_back_the_same(data, tmp_path):
    marks = [{"start": 0, "end": 2, "kind": "rude"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rows = [GOOD | {"id": "x", "faults": marks, "margin": 0.0, "subset": "s"}, GOOD | {"prompt": turns, "tools": tools}]
    data(rows, "--rule", "token", "--output_file", str(tmp_path / "out.jsonl"))
    before, after = (load_preferences(str(tmp_path / name)).pairs for name in ("rows.jsonl", "out.jsonl"))
    assert [{**vars(pair), "where": ""} for pair in before] == [{**vars(pair), "where": ""} for pair in after]
    assert all(isinstance(record["chosen"], list) for _, record in read_records(tmp_path / "out.jsonl"))


def test_prompts_are_shown_with_their_other_columns(data):
    shown = data([{"prompt": "What?", "tests": {"inputs": [1]}}, {"prompt": "What?"}, {"prompt": "Why? " * 40}])
    assert (
        "Usable prompts: 2" in shown and "(prompt-only, standard)" in shown and "1 left out: repeated prompt" in shown
    )
    assert "What?<|im_end|>" in shown and "tests: {'inputs': [1]}" in shown


def test_token_ids_are_shown_by_their_text(data, tiny_dir):
    shown = data([{"prompt_ids": [70, 71], "chosen_ids": [72, 73, 2], "rejected_ids": [74]}], "--rule", "token")
    assert "(preference, token ids)" in shown
