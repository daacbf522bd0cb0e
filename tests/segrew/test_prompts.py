"""Prompts for rollouts: from prompt or messages columns, once each, with their other columns."""

import json

import pytest

from segrew.preferences import everyday_pairs
from segrew.prompts import load_prompts

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def load(tmp_path):
    def run(*rows):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(str(tmp_path / "p.jsonl"))

    return run


def test_text_and_messages_and_whole_conversations(load):
    answer = {"role": "assistant", "content": "hello"}
    system = {"role": "system", "content": "Be kind."}
    found = load({"prompt": "hi"}, {"prompt": [system, USER]}, {"messages": [USER, answer, USER, answer]})
    assert [prompt.messages for prompt in found] == [[USER], [system, USER], [USER, answer, USER]]


def test_other_columns_stay_with_the_first_of_equal_prompts(load):
    found = load({"prompt": "hi", "tests": [1]}, {"prompt": [USER], "tests": [2]}, {"prompt": "bye", "id": 7})
    assert [prompt.columns for prompt in found] == [{"tests": [1]}, {"id": 7}]


@pytest.mark.parametrize("row", [{"text": "hi"}, {"prompt": ""}, {"prompt": []}, {"messages": None}])
def test_a_row_without_prompt_names_its_line(load, row):
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: no column 'prompt' or 'messages'"):
        load({"prompt": "hi"}, row)


@pytest.mark.parametrize(
    "value", [[{"role": "assistant", "content": "x"}], [{"role": "user", "content": None}], [1], 5]
)
def test_a_prompt_of_no_text_names_its_line(load, value):
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1: column 'prompt'"):
        load({"prompt": value})


def test_the_embedded_prompts_are_those_of_the_pairs():
    found = load_prompts("everyday", "test")
    assert [p.messages for p in found] == [pair.prompt for pair in everyday_pairs("test")]
    assert found[0].columns == {"id": everyday_pairs("test")[0].id}
