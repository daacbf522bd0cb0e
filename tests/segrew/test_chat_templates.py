"""Templates as they are found: without a system role, with today's date, with tools, and what refuses."""

import datetime
import json
import warnings

import pytest

from segrew.chat import ChatFormat
from segrew.chat_templates import FROZEN_DATE, freeze_date, merge_system
from segrew.encoding import encode_pair
from segrew.preferences import PreferencePair, load_preferences

BODY = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + BODY
DROPS = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
)
S, U, A = ({"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant"))


@pytest.fixture
def chat(build_byte_tokenizer):
    def build(template: str, **options) -> ChatFormat:
        tokenizer = build_byte_tokenizer()
        tokenizer.chat_template = template
        return ChatFormat.from_tokenizer(tokenizer, **options)

    return build


@pytest.mark.parametrize("template", [REFUSES, DROPS, ALTERNATES])
def test_b08_a_system_message_is_merged_into_the_first_user_turn_and_said_once(chat, template):
    built = chat(template)
    with pytest.warns(UserWarning, match="no role 'system'") as told:
        rendered = [built.render([S, U, A, U]) for _ in range(3)]
    assert rendered == ["user:S\n\nU|assistant:A|user:U|"] * 3 and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built.render([U, A, U]) == "user:U|assistant:A|user:U|"


def test_b08_chosen_and_rejected_are_rendered_alike(chat):
    built = chat(REFUSES)
    with pytest.warns(UserWarning):
        pair = encode_pair(PreferencePair([S, U], "A", "B"), built, 64)
    assert pair.prompts[0] == pair.prompts[1] and built.decode(pair.prompts[0]) == "user:S\n\nU|"


def test_b08_strictly_it_is_an_error_that_names_row_and_role(chat, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [S, U], "chosen": "A", "rejected": "B"}))
    (pair,) = load_preferences(str(tmp_path / "a.jsonl")).pairs
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: the chat template has no role 'system'"):
        encode_pair(pair, chat(REFUSES, system_role="error"), 64)
    encode_pair(pair, chat(BODY, system_role="error"), 64)  # a template with that role has no need of it


@pytest.mark.parametrize("template", [REFUSES, ALTERNATES])
@pytest.mark.parametrize("messages", [[U, U], [S, U, U], [U, S], [U, A, A]])
def test_b08_roles_that_do_not_alternate_name_the_row(chat, template, messages):
    with pytest.raises(ValueError, match=r"here: the chat template .*user"):
        encode_pair(PreferencePair(messages, "A", "B", where="here"), chat(template), 64)


def test_b08_a_template_with_a_system_role_gets_the_messages_as_they_are(chat):
    assert chat(BODY).render([S, U, U]) == "system:S|user:U|user:U|"


def test_a_system_message_alone_becomes_the_user_s():
    assert merge_system([S]) == [{"role": "user", "content": "S"}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    tool = {"role": "tool", "content": "x"}
    assert merge_system([U, call, tool, tool, A]) == [U, call, tool, tool, A]


DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}|{{ strftime_now( \"%A\" ) }}|" + BODY


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2031, 1, 2)


def test_the_date_in_a_template_is_the_same_on_every_day(chat, monkeypatch, tmp_path):
    with pytest.warns(UserWarning, match="writes today's date; segrew writes 26 Jul 2024"):
        built = chat(DATED)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert built.render([U]) == "26 Jul 2024|Friday|user:U|" and FROZEN_DATE.weekday() == 4
    with pytest.warns(UserWarning):
        assert chat(DATED).fingerprint == built.fingerprint
    built.tokenizer.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ChatFormat.from_tokenizer(type(built.tokenizer).from_pretrained(tmp_path))
    assert again.fingerprint == built.fingerprint and again.render([U]) == built.render([U])


def test_a_date_that_cannot_be_frozen_is_refused():
    with pytest.raises(ValueError, match="cannot be frozen"):
        freeze_date("{{ strftime_now(format) }}")
    assert freeze_date(BODY) == BODY


def test_tools_and_other_arguments_reach_the_template(chat):
    built = chat("{% if tools %}{{ tools[0]['name'] }}{% endif %}{{ mood }}|" + BODY)
    prompt = built.prompt_ids([U], {"tools": [{"name": "f"}], "mood": "calm"})
    assert built.decode(prompt) == "fcalm|user:U|"
    pair = PreferencePair([U], "A", "B", template={"tools": [{"name": "f"}]})
    assert built.decode(encode_pair(pair, built, 64).prompts[1]) == "f|user:U|"
