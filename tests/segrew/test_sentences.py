"""Sentences: abbreviations, decimals, lists, quotes, Markdown, code, line breaks; whatever the text, it is tiled."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segrew.sentences import Block, blocks_of, sentence_starts


def units(text: str) -> list[str]:
    starts = sentence_starts(text)
    return [text[a:b] for a, b in itertools.pairwise([0, *starts[1:], len(text)])]


GOLDEN = {
    "abbreviations": ["Dr. Smith went home. ", "He was tired, e.g. from work, i.e. the desk. ", "OK?"],
    "titles and initials": ["Mr. J. R. Smith met Mrs. Jones. ", "They spoke."],
    "the end of an abbreviation": ["I live in the U.S. ", "He does not."],
    "decimals": ["Pi is 3.14, and 2.5 kg cost $4.50. ", "Version 2.0.1 is out."],
    "names": ["See www.example.com or main.py for more. ", "Done."],
    "marks": ["What?! ", "Really... yes. ", "Well, good! ", "Wait…"],
    "quotes": ['She said "Hello there. How are you?" and left. ', '"Why?" ', "He knew."],
    "lines": ["A title\n", "Two lines\n\n\n  ", "and a third. ", "With two.\r\n", "Last"],
    "a list": ["A list:\n", "1. First item. ", "It is good.\n", "2. Second\n", "- bullet one\n", "* last. ", "Yes."],
    "letters": ["(a) First. ", "And more.\n", "b) Second."],
    "headings and bold": ["# Why it works. ", "Or not\n\n", "**Bold.** ", "Text. ", "*It.* ", "End."],
    "footnotes": ["It ended.[1] ", "Next."],
    "emoji": ["Great! ", "Next one 🙂! ", "Ok 🙂🙂"],
    "another script": ["你好。", "你好吗？", "我很好！"],
    "space": ["  Leading.  ", "Two.  "],
    "a fenced block": ["Use this:\n\n", "```py\nimport os.path\n", "x = 3. real\n\n\n", "y = 2\n```\n", "Ok. ", "So."],
    "an open fence": ["~~~\nopen. end. x\n", "y. z"],
    "code in a line": ["Call ```f(x)``` now. ", "Then stop."],
    "nothing": [""],
    "blank": [" \n"],
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_sentences(name):
    assert units("".join(GOLDEN[name])) == GOLDEN[name]


def test_languages_have_their_own_abbreviations():
    text = "Das gilt bzw. Hr. Mayer sagt es. Er geht."
    assert [text[a:] for a in sentence_starts(text, "de")][-1] == "Er geht."


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("aB. !?\n\r\t\"'*()[1]-`~#é🙂日。\u0301\xa0\u2028\x85\ufffd"), max_size=40))
@example("J\u2028. Smith")  # the splitter itself fails on this
@example("a\xa0J\xa0.\u3000b")
def test_starts_rise_and_stand_on_characters(text):
    starts = sentence_starts(text)
    assert starts == sorted(set(starts))
    assert all(not text[start].isspace() for start in starts)
    assert starts[:1] == ([len(text) - len(text.lstrip())] if text.strip() else [])


def test_blocks_by_hand():
    text = "a\n```Python x\ncode\n```\nb\n````\n```\nc\n"
    assert list(blocks_of(text)) == [
        Block(0, 2),
        Block(2, 23, (14, 19), "python"),
        Block(23, 25),
        Block(25, 36, (30, 36), ""),
    ]
    assert "".join(text[block.start : block.end] for block in blocks_of(text)) == text


def test_a_fence_needs_three_marks_of_one_kind_and_no_more_on_its_line():
    for text in ("``\na. b\n``", "```a``` b", "a ```\nb"):
        assert [block.code for block in blocks_of(text)] == [None]
    assert [block.code for block in blocks_of("```\na\n~~~\n``` b\n```")] == [(4, 16)]
