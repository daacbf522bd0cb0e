"""Phrases from hand-made dependency trees, and what is said where spaCy or a pipeline is missing."""

import sys
from itertools import pairwise

import pytest

from segrew.phrases import load_parser, parser_identity, phrase_starts
from segrew.segmentation import SegmentationConfig

spacy = pytest.importorskip("spacy")


def phrases(words: list[str], heads: list[int], max_words: int) -> list[str]:
    """Units of a parse; the words from each phrase's start to the next."""
    document = spacy.tokens.Doc(spacy.blank("en").vocab, words=words, heads=heads, deps=["dep"] * len(words))
    starts = phrase_starts(document, max_words)
    edges = [*starts, len(document.text)]
    return [document.text[a:b].strip() for a, b in pairwise(edges)]


FOX = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "."], [3, 3, 3, 4, 4, 4, 8, 8, 5, 4]


@pytest.mark.parametrize(
    ("max_words", "expected"),
    [
        (10, ["The quick brown fox jumps over the lazy dog ."]),
        (6, ["The quick brown fox", "jumps over the lazy dog ."]),
        (5, ["The quick brown fox", "jumps over the lazy dog ."]),  # the paper's example: edges 0, 4, 10
        (4, ["The quick brown fox jumps", "over the lazy dog ."]),
        (3, ["The quick brown fox jumps over", "the lazy dog ."]),
        (1, ["The quick brown fox jumps over the lazy dog ."]),  # nothing but single words
    ],
)
def test_subtrees_are_taken_from_the_top(max_words, expected):
    """Invariant 10."""
    assert phrases(*FOX, max_words) == expected


def test_a_single_word_opens_a_unit_only_at_the_start_of_a_sentence():
    words = ["We", "saw", "it", ".", "He", "read", "the", "long", "book", "to", "us", "."]
    heads = [1, 1, 1, 1, 5, 5, 8, 8, 5, 5, 9, 5]
    assert phrases(words, heads, 3) == ["We", "saw it .", "He read", "the long book", "to us ."]
    assert phrases(words, heads, 4) == ["We saw it .", "He read", "the long book", "to us ."]
    assert phrases(words, heads, 6) == ["We saw it .", "He", "read the long book to us ."]


def test_a_subtree_with_a_gap_is_no_phrase():
    """The second word depends on the last: their subtree of two is not in one piece."""
    assert phrases(["a", "b", "c", "d"], [2, 3, 2, 2], 2) == ["a b c d"]


def test_white_space_is_no_word():
    words, heads = ["The", "dog", "\n\n", "ran", "\n", "home"], [1, 3, 1, 3, 3, 3]
    assert phrases(words, heads, 4) == ["The dog \n\n ran \n home"]
    assert phrases(words, heads, 2) == ["The dog", "ran \n home"]


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    rule = SegmentationConfig("constituency", parser="no_such_pipeline")
    message = r"--parser no_such_pipeline: no such spaCy pipeline.*python -m spacy download no_such_pipeline.*path"
    with pytest.raises(ValueError, match=message) as error:
        rule.software()
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "spacy", None)
    load_parser.cache_clear()
    with pytest.raises(ValueError, match=r"which is not installed: pip install 'segrew\[parse\]'"):
        rule.software()


def test_the_identity_is_the_pipeline_s_and_not_its_path(parser_dir, tmp_path):
    import shutil

    shutil.copytree(parser_dir, tmp_path / "moved")
    here, moved = (SegmentationConfig("constituency", parser=str(p)) for p in (parser_dir, tmp_path / "moved"))
    assert parser_identity(str(parser_dir)) == {"parser": "en_pipeline 0.0.0", "spacy": spacy.__version__}
    names = {"segmenter": "", "tokenizer": "t", "read_position": "end"}
    assert here.fingerprint(**names) == moved.fingerprint(**names)
    other = SegmentationConfig("constituency", parser=str(parser_dir), max_phrase_words=4)
    assert other.fingerprint(**names) != here.fingerprint(**names)
