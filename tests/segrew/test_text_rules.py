"""Rules that read text, from ids to units: every rule tiles any text, and none but token splits a character."""

import importlib.metadata
import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segrew import text_rules
from segrew.chat import ChatFormat
from segrew.segmentation import RULES, Segmentation, SegmentationConfig, segment
from segrew.text_rules import warn_of_fallbacks

NAMES = {"segmenter": "s", "tokenizer": "t", "read_position": "end"}


def cut(chat: ChatFormat, config: SegmentationConfig, texts: list[str], side: str = "right") -> Segmentation:
    """Cut finished responses; signals drawn from a seed."""
    rows = [chat.response_ids(text) for text in texts]
    width = max(map(len, rows)) + 2
    mask = torch.tensor([[j < len(row) for j in range(width)] for row in rows])
    signal = torch.rand(mask.shape, generator=torch.Generator().manual_seed(width)) * 2
    if side == "left":
        moved = mask.flip(1)
        mask, signal = moved, torch.zeros(mask.shape).masked_scatter(moved, signal[mask])
    return segment(
        config, mask, entropy=signal, logprobs=-signal, texts=chat.response_texts(rows),
        ended=torch.ones(len(rows), dtype=torch.bool), generator=torch.Generator().manual_seed(3),
    )  # fmt: skip


def units(chat: ChatFormat, config: SegmentationConfig, text: str) -> list[str]:
    ends = cut(chat, config, [text]).ends[0].tolist()
    return [text[a:b] for a, b in chat.cut_text(chat.response_ids(text), ends, text)]


@pytest.fixture(scope="session")
def chat(build_byte_tokenizer) -> ChatFormat:
    """A byte tokenizer in which a space and a bracket join the byte behind them."""
    return ChatFormat.from_tokenizer(build_byte_tokenizer((("Ġ", "ð"), ("Ġ", "a"), ("(", "a"), ("Ġ", "("))), "raw")


@pytest.fixture(scope="session")
def rules(parser_dir) -> dict[str, SegmentationConfig]:
    settings = {"threshold": 1.0, "n": 2, "max_phrase_words": 2, "parser": str(parser_dir), "max_code_tokens": 4}
    return {name: SegmentationConfig(name, **settings) for name in RULES}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet=st.sampled_from("ab(.\n =1é🙂日\u0301`\xa0"), max_size=16), min_size=1, max_size=3))
def test_b11_every_rule_tiles_any_text_in_whole_characters(chat, rules, texts):
    for name, config in rules.items():
        right, left = cut(chat, config, texts), cut(chat, config, texts, "left")
        for row, text in enumerate(texts):
            ids = chat.response_ids(text)
            count = int(right.counts[row])
            lengths = right.lengths[row, :count].tolist()
            assert sum(lengths) == len(ids) and min(lengths) > 0, name
            assert left.lengths[row, : int(left.counts[row])].tolist() == lengths, name
            for source in (text, None):
                spans = chat.cut_text(ids, right.ends[row, :count].tolist(), source)
                assert "".join(text[a:b] for a, b in spans) == text, name
            if name != "token":  # decoded alone, a unit of half a character would show a replacement mark
                parts = [chat.decode(ids[end - length + 1 : end + 1])
                         for end, length in zip(right.ends[row, :count].tolist(), lengths, strict=True)]  # fmt: skip
                assert parts == [text[a:b] for a, b in spans] and "\ufffd" not in "".join(parts), name


def test_golden_units_of_each_rule(chat, rules):
    text = "Dr. A ran. He won: e.g. 3.5 m.\n```\na = 1\nb = a + 1\n```"
    assert units(chat, rules["sentence"], text) == ["Dr. A ran. ", "He won: e.g. 3.5 m.\n", "```\na = 1\n",
                                                    "b = a + 1\n```"]  # fmt: skip
    code = SegmentationConfig("python_ast", max_code_tokens=5)
    assert units(chat, code, text)[2:] == ["```\na = 1\n", "b =", " a + 1\n```"]
    assert units(chat, rules["constituency"], "one two three four five six") == ["one two ", "three four ", "five six"]


def test_a_cut_off_response_keeps_its_units(chat):
    """What was cut before the truncation is cut the same way after it."""
    whole, config = "First one. Then two. Last three.", SegmentationConfig("sentence")
    ids = chat.response_ids(whole)[:24]
    units = segment(config, torch.ones(1, 24, dtype=torch.bool), texts=chat.response_texts([ids]))
    assert units.lengths.tolist() == [[11, 10, 3]]


def test_a_phrase_inside_a_token_makes_every_token_of_that_response_a_unit(chat, rules):
    """Invariant 10. (a is one token and two words: the phrase that begins with its a has no token of its own."""
    texts = ["x (a b b b b b", "x x y b b b b b"]
    found = cut(chat, rules["constituency"], texts)
    assert found.fallback.tolist() == [True, False]
    assert found.lengths[0, : int(found.counts[0])].tolist()[:-1] == [1] * (int(found.counts[0]) - 1)
    assert int(found.counts[1]) == 4
    with pytest.warns(UserWarning, match=r"1 of 2 responses \(50\.0%\) have phrases that begin inside a token"):
        warn_of_fallbacks([found])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fallbacks([found.select(torch.tensor([1])), cut(chat, rules["sentence"], texts)])


def test_a_pipeline_without_a_parser_is_refused(chat, tmp_path):
    spacy = pytest.importorskip("spacy")
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match=r"this pipeline parses nothing \(its components: none\)"):
        cut(chat, SegmentationConfig("constituency", parser=str(tmp_path / "blank")), ["Some text."])


def test_fingerprints_cover_the_splitter_and_what_each_rule_reads(monkeypatch):
    for name in ("sentence", "python_ast"):
        config = SegmentationConfig(name)
        here = config.fingerprint(**NAMES)
        assert here == SegmentationConfig(name, max_phrase_words=9, parser="x", n=1).fingerprint(**NAMES)
        assert here == config.fingerprint(**NAMES | {"segmenter": "other"})
        assert here != SegmentationConfig(name, language="de").fingerprint(**NAMES)
        assert config.software() == {"sentencex": importlib.metadata.version("sentencex")}
        with monkeypatch.context() as patch:
            patch.setattr(text_rules, "version", lambda name: "0.0.1")
            assert here != config.fingerprint(**NAMES)
    codes = [SegmentationConfig("python_ast", max_code_tokens=n).fingerprint(**NAMES) for n in (5, 6)]
    assert codes[0] != codes[1]
    assert SegmentationConfig("ngram").software() == {}


def test_splitter_and_parser_are_imported_only_when_used():
    code = (
        "import sys; from segrew.segmentation import *; import torch; import segrew.text_rules\n"
        "segment(SegmentationConfig('ngram'), torch.ones(1, 3, dtype=torch.bool))\n"
        "print(sorted({'sentencex', 'spacy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_units_of_real_answers_have_the_lengths_that_their_rules_promise(chat):
    """On the embedded answers sentences are longer than lines of four phrases, and code rules leave prose alone."""
    from segrew.preferences import everyday_pairs

    texts = [pair.chosen for pair in everyday_pairs("test")[:20]]
    sentences, code = (cut(chat, SegmentationConfig(name), texts) for name in ("sentence", "python_ast"))
    plain = [row for row, text in enumerate(texts) if "```" not in text]
    assert len(plain) > 10
    assert all(torch.equal(sentences.ids[row], code.ids[row]) for row in plain)
    ends = [text[: stop].rstrip()[-1] for row, text in enumerate(texts) for _, stop in itertools.islice(
        chat.cut_text(chat.response_ids(text), sentences.ends[row, : int(sentences.counts[row])].tolist(), text), 99
    )]  # fmt: skip
    assert sum(end in ".!?:`" for end in ends) / len(ends) > 0.8
