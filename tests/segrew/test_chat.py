"""One tokenisation path: BOS, stop tokens, the seam between prompt and response, and text offsets."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from segrew.chat import ChatFormat
from segrew.chat_templates import NAMED_TEMPLATES
from segrew.encoding import encode_pair
from segrew.preferences import PreferencePair

HI = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
TEMPLATES = {"with <s>": "<s>" + PLAIN, "without": PLAIN}
ENDS = "{% for m in messages %}{{ m['content'] }}{{ '<|end|>\n' if m['role'] == 'assistant' }}{% endfor %}"


@pytest.fixture
def chat(build_byte_tokenizer):
    def build(template: str = "raw", *, jinja: str | None = None, **options) -> ChatFormat:
        tokenizer = build_byte_tokenizer(**options)
        tokenizer.chat_template = jinja
        return ChatFormat.from_tokenizer(tokenizer, None if jinja else template)

    return build


@pytest.mark.parametrize("name", TEMPLATES)
def test_b07_one_bos_whoever_writes_it(chat, name):
    built = chat(jinja=TEMPLATES[name], adds_bos=True)
    ids = built.prompt_ids(HI) + built.response_ids("yo")
    assert ids[0] == 1 and ids[1:].count(1) == 0
    pair = encode_pair(PreferencePair(HI, "yo", "no"), built, max_length=64)
    assert pair.prompts[0] + pair.chosen == ids


@pytest.mark.parametrize("text", ["<s>", "<s>hi", "a <s> b"])
@pytest.mark.parametrize("template", ["with <s>", "without", "raw"])
def test_b07_bos_in_the_user_s_text_adds_no_leading_one(chat, template, text):
    built = chat(jinja=TEMPLATES.get(template, NAMED_TEMPLATES["raw"]), adds_bos=True)
    ids = built.prompt_ids([{"role": "user", "content": text}])
    assert ids[0] == 1 and ids[1] != 1 if len(ids) > 1 else ids == [1]


def test_b07_no_bos_where_the_tokenizer_adds_none(chat):
    assert 1 not in chat(jinja=PLAIN).prompt_ids(HI)


def test_b10_a_merge_across_the_seam_does_not_move_it(chat):
    built = chat(merges=(("b", "c"),))
    joint = built.tokenizer("abcd", add_special_tokens=False)["input_ids"]
    assert len(joint) == 3  # the merge is there
    prompt, response = built.prompt_ids([{"role": "user", "content": "ab"}]), built.response_ids("cd")
    assert built.tokenizer.convert_ids_to_tokens(prompt + response) == ["a", "b", "c", "d", "</s>"]
    assert built.decode(prompt) + built.decode(response) == "abcd"
    pair = encode_pair(PreferencePair([{"role": "user", "content": "ab"}], "cd", "ce"), built, max_length=64)
    assert (pair.prompts[0], pair.chosen) == (prompt, response)


def test_a_base_model_without_template_is_refused_with_the_ways_out(build_byte_tokenizer):
    with pytest.raises(ValueError, match=r"no chat template.*--chat_template raw.*chatml.*\.jinja"):
        ChatFormat.from_tokenizer(build_byte_tokenizer())


def test_a_tokenizer_without_end_token_is_refused(build_byte_tokenizer):
    tokenizer = build_byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        ChatFormat.from_tokenizer(tokenizer, "raw")


def test_named_templates_render_as_written_here(chat, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert chat("raw").render(messages) == "Be brief.hi"
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat("chatml").render(messages) == expected
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert chat(str(tmp_path / "own.jinja")).render(messages) == "system:Be brief.\nuser:hi\n"
    with pytest.raises(ValueError, match=r"--chat_template nothing: neither one of \['chatml', 'raw'\] nor"):
        chat("nothing")


def test_a_template_that_refuses_a_plain_conversation_is_an_error_of_ours(chat):
    with pytest.raises(ValueError, match="does not render"):
        chat(jinja="{{ raise_exception('no') }}")


def test_the_stop_token_is_what_the_template_writes_after_the_assistant(build_byte_tokenizer):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = ENDS
    built = ChatFormat.from_tokenizer(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert built.stop_id == end and built.stop_ids == (end, 2)
    assert built.response_ids("a") == [*tokenizer("a", add_special_tokens=False)["input_ids"], end]  # no "\n" after it


def test_a_special_stop_token_without_a_name_is_found(build_byte_tokenizer):
    """Phi-3's <|end|> is special but is neither its end token nor listed among the additional ones."""
    tokenizer = build_byte_tokenizer()
    tokenizer._tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.chat_template = ENDS
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end not in tokenizer.all_special_ids
    assert ChatFormat.from_tokenizer(tokenizer).stop_id == end


def test_a_template_that_writes_no_stop_token_leaves_the_end_token(chat):
    built = chat("raw")
    assert built.stop_id == 2 and built.stop_ids == (2,) and built.response_ids("")[-1:] == [2]


def test_an_empty_prompt_is_refused(chat):
    with pytest.raises(ValueError, match="a prompt of no tokens"):
        chat("raw").prompt_ids([{"role": "user", "content": ""}])


def test_the_fingerprint_tells_vocabularies_and_templates_apart(chat, build_byte_tokenizer):
    assert chat("raw").fingerprint == chat("raw").fingerprint
    swapped = build_byte_tokenizer(merges=(("b", "c"),))
    assert len({chat("raw").fingerprint, chat("chatml").fingerprint,
                ChatFormat.from_tokenizer(swapped, "raw").fingerprint}) == 3  # fmt: skip


def tiles(chat: ChatFormat, text: str, ends: list[int], source: str | None) -> list[str]:
    ids = chat.response_ids(text)
    spans = chat.cut_text(ids, ends, source)
    assert spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    pieces = [text[start:stop] for start, stop in spans]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    return pieces


@pytest.mark.parametrize("path", ["text", "ids"])
def test_b11_a_cut_inside_a_character_moves_behind_it(chat, path):
    built, text = chat("raw"), "a🙂é"
    ids = built.response_ids(text)
    assert len(ids) == 7 + 1
    source = text if path == "text" else None
    assert tiles(built, text, [2, 7], source) == ["a🙂", "é"]
    assert tiles(built, text, [0, 4, 7], source) == ["a", "🙂", "é"]
    assert tiles(built, text, [0, 3, 5, 7], source) == ["a", "🙂", "é", ""]
    assert "".join(tiles(built, text, list(range(8)), source)) == text


@pytest.mark.parametrize("path", ["text", "ids"])
@pytest.mark.parametrize("text", ["👨‍👩‍👧", "e\u0301", "\ufeffx", "日本語", " lead and trail ", "\n\n"])
def test_b11_other_text_of_many_bytes_is_rebuilt(chat, text, path):
    built = chat("raw")
    count = len(built.response_ids(text))
    for end in range(count):
        ends = [end, count - 1] if end < count - 1 else [end]
        tiles(built, text, ends, text if path == "text" else None)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab é🙂\n日\u0301"), max_size=8), data=st.data())
def test_units_tile_any_text_in_both_paths(build_byte_tokenizer, text, data):
    built = ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")
    count = len(built.response_ids(text))
    inner = data.draw(st.sets(st.integers(0, count - 1)))
    ends = sorted(inner | {count - 1})
    assert tiles(built, text, ends, text) == tiles(built, text, ends, None)


def test_bytes_that_are_no_text_still_tile(chat):
    """A policy may sample half a character and go on."""
    built = chat("raw")
    ids = built.response_ids("a🙂é")
    ids = [ids[0], ids[1], ids[2], ids[5], ids[6], built.stop_id]  # a, half of the emoji, é
    text = built.decode(ids)
    assert text == "a\ufffdé"
    spans = built.cut_text(ids, [0, 1, 2, 5])
    assert [text[a:b] for a, b in spans] == ["a", "\ufffd", "", "é"]


def test_special_tokens_are_not_part_of_the_text(chat):
    built = chat("raw")
    assert built.decode(built.response_ids("ok")) == "ok"
