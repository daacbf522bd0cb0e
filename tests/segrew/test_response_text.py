"""Tokens and the characters they cover: equal to the tokenizer's own offsets, and a tiling of any text."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from segrew.chat import ChatFormat
from segrew.response_text import ResponseText

FAMILY = "👨‍👩‍👧"
UNICODE = st.text(alphabet=st.sampled_from("ab .\n(é🙂日\u0301\ufffd\u200d"), max_size=12)


@pytest.fixture(scope="session")
def chat_of(build_byte_tokenizer) -> Callable:
    def build(merges: tuple = ()) -> ChatFormat:
        return ChatFormat.from_tokenizer(build_byte_tokenizer(merges), "raw")

    return build


@pytest.fixture(scope="session")
def sentencepiece_chat() -> ChatFormat:
    """Words with a leading ▁, bytes for what is not in the vocabulary, and a decoder that strips the first space."""
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ["▁", "a", "b", "▁a", "."]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return ChatFormat.from_tokenizer(fast, "raw")


def test_b11_tokens_of_one_character_share_it(chat_of):
    built = chat_of()
    text = built.response_text(built.response_ids("a🙂é"))
    assert text.text == "a🙂é"
    assert text.spans == [(0, 1), *[(1, 2)] * 4, *[(2, 3)] * 2, (3, 3)]
    assert text.continues == [False, False, True, True, True, False, True, False]


@settings(max_examples=80, deadline=None)
@given(UNICODE)
def test_spans_are_the_tokenizer_s_offsets(chat_of, text):
    """Merges join halves of characters with their neighbours: Ġ and Ł are a space and the emoji's second byte."""
    for merges in ((), (("Ġ", "ð"), ("ð", "Ł"), ("Ġð", "Ł"), ("Ł", "Ļ")), (("Ĥ", "a"), ("(", "a"))):
        built = chat_of(merges)
        encoded = built.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        got = built.response_text(encoded["input_ids"])
        assert (got.text, list(got.spans)) == (text, encoded["offset_mapping"])


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab .é🙂"), max_size=8))
def test_a_decoder_that_strips_the_first_space_tiles_too(sentencepiece_chat, text):
    ids = sentencepiece_chat.response_ids(text)
    got = sentencepiece_chat.response_text(ids)
    assert got.text == sentencepiece_chat.decode(ids) == text
    assert "".join(got.text[max(start, before) : end] for (_, before), (start, end) in
                   itertools.pairwise([(0, 0), *got.spans])) == text  # fmt: skip
    tokens = sentencepiece_chat.tokenizer.convert_ids_to_tokens(ids)
    inside = [name.startswith("<0x") and int(name[3:5], 16) & 0xC0 == 0x80 for name in tokens]
    assert got.continues == inside


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=10))
def test_any_sampled_ids_have_spans_that_tile_their_text(chat_of, ids):
    """A policy may sample bytes that are no characters."""
    built = chat_of()
    got = built.response_text(ids)
    assert got.text == built.decode(ids) and len(got.spans) == len(ids)
    ends = [end for _, end in got.spans]
    assert ends == sorted(ends) and (not ends or ends[-1] == len(got.text))
    edges = list(itertools.pairwise([(0, 0), *got.spans]))
    assert all(before - 1 <= start <= before and start <= end for (_, before), (start, end) in edges)


def test_units_of_characters_become_units_of_tokens():
    """Words with their space before them, a token of two words' letters, a blank token, a stop token."""
    text = ResponseText("Go on. (a b)  c", [(0, 2), (2, 5), (5, 6), (6, 9), (9, 12), (12, 13), (13, 15), (15, 15)])
    assert text.heads == [0, 3, 5, 7, 10, 12, 14, 15]
    assert text.token_spans([0, 3, 14]) == [(0, 1), (1, 6), (6, 8)]
    assert text.token_spans([0, 8]) == [(0, 4), (4, 8)]  # a is inside " (a", so the next token opens
    assert text.token_spans([3, 7]) == [(0, 3), (3, 8)]  # the first unit begins with the response
    assert text.token_spans([]) == text.token_spans([0]) == [(0, 8)]
    assert ResponseText("", []).token_spans([0]) == []
    assert [text.count(0, 7), text.count(3, 15), text.count(8, 9)] == [3, 6, 0]


def test_texts_are_made_when_asked_for(chat_of):
    built = chat_of()
    rows = [built.response_ids("one"), built.response_ids(FAMILY)]
    texts = built.response_texts(rows)
    assert len(texts) == 2 and [text.text for text in texts] == ["one", FAMILY]
    assert texts[1] == built.response_text(rows[1])
