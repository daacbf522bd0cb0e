"""Prompts for rollouts: from prompt or messages columns, once each, with their other columns."""

import json

import pytest

from segrew.chat import ChatFormat
from segrew.preferences import everyday_pairs
from segrew.prompts import Prompt, encode_prompts, load_prompts

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def load(tmp_path):
    def run(*rows):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(str(tmp_path / "p.jsonl")).prompts

    return run


def test_text_and_messages_and_whole_conversations(load):
    answer = {"role": "assistant", "content": "hello"}
    system = {"role": "system", "content": "Be kind."}
    pair = {"chosen": [USER, answer, system, answer], "rejected": [USER, answer, system, answer | {"content": "no"}]}
    found = load({"prompt": "hi"}, {"prompt": [system, USER]}, {"messages": [USER, answer, USER, answer]}, pair)
    expected = [[USER], [system, USER], [USER, answer, USER], [USER, answer, system]]
    assert [prompt.messages for prompt in found] == expected and found[-1].columns == {}


def test_other_columns_stay_with_the_first_of_equal_prompts(load):
    found = load({"prompt": "hi", "tests": [1]}, {"prompt": [USER], "tests": [2]}, {"prompt": "bye", "id": 7})
    assert [prompt.columns for prompt in found] == [{"tests": [1]}, {"id": 7}]


def test_tools_are_the_template_s_and_no_column(load):
    (prompt,) = load({"prompt": "hi", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}, "id": 3})
    assert prompt.template == {"a": 1, "tools": [{"name": "f"}]} and prompt.columns == {"id": 3}


def test_a_row_without_prompt_names_its_line(load):
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: no column 'prompt' or 'messages'"):
        load({"prompt": "hi"}, {"text": "hi"})


@pytest.mark.parametrize("value", [[1], 5, [{"role": "user"}]])
def test_a_prompt_of_another_kind_names_its_line(load, value):
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1: column 'prompt'"):
        load({"prompt": value})


def test_b17_prompts_of_no_text_are_counted(tmp_path):
    rows = [{"prompt": "hi"}, {"prompt": "hi"}, {"prompt": ""}, {"prompt": []}, {"messages": None}]
    rows += [{"prompt": [{"role": "assistant", "content": "x"}]}, {"prompt": [{"role": "user", "content": None}]}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows += [{"prompt": " \n\t"}, {"messages": [{"role": "system", "content": "Be brief."}, USER | {"content": "  "}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (source,) = load_prompts(str(path)).sources
    assert source.skipped == {"repeated prompt": 1, "empty prompt": 3, "no text in the prompt": 4}
    path.write_text(json.dumps(rows[2]))
    with pytest.raises(ValueError, match=r"0 of 1 rows are usable prompts \(1 empty prompt\)"):
        load_prompts(str(path))


def test_the_embedded_prompts_are_those_of_the_pairs():
    found = load_prompts("everyday", "test").prompts
    assert [p.messages for p in found] == [pair.prompt for pair in everyday_pairs("test")]
    assert found[0].columns["id"] == everyday_pairs("test")[0].id


@pytest.fixture
def chat(build_byte_tokenizer):
    return ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")


def test_long_prompts_are_left_out_cut_or_refused(chat):
    prompts = [Prompt([{"role": "user", "content": text}], where=f"row {text}") for text in ("abc", "abcdef", "ab")]
    kept, ids, counts = encode_prompts(prompts, chat, 4)
    assert kept == [prompts[0], prompts[2]] and counts == {"prompts left out: longer than --max_prompt_length": 1}
    assert list(map(chat.decode, ids)) == ["abc", "ab"]
    kept, ids, counts = encode_prompts(prompts, chat, 4, "truncate_prompt_left")
    assert kept == prompts and list(map(chat.decode, ids)) == ["abc", "cdef", "ab"]
    assert counts == {"prompts cut to --max_prompt_length": 1}
    with pytest.raises(ValueError, match="row abcdef: more than --max_prompt_length 4 tokens"):
        encode_prompts(prompts, chat, 4, "error")
    with pytest.raises(ValueError, match="--max_prompt_length 1: all 3 prompts are longer"):
        encode_prompts(prompts, chat, 1)
