"""Statements and expressions as units; unfinished code; prose around it. Here one character is one token."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segrew.python_code import code_starts
from segrew.response_text import ResponseText


def units(text: str, max_tokens: int) -> list[str]:
    """Cut a text of which every character but a space is a token."""
    places = [(i, i + 1) for i, character in enumerate(text) if character != " "]
    starts = code_starts(ResponseText(text, places), max_tokens)
    return [text[a:b] for a, b in itertools.pairwise([0, *starts[1:], len(text)])]


GOLDEN = [
    # Small statements are whole; a larger one gives its parts.
    (["a = 1\n", "b = 2\n"], 6),
    (["aa = ", "bbb + ", "ccc\n"], 4),
    (["aa = ", "bbb + ccc\n"], 7),
    # Statements of one line, in units of their own.
    (["ab = 1; ", "cd = 2"], 5),
    # A compound statement: its header, then its body. A small one is whole.
    (["if x:\n    ", "yy = 1\n", "else:\n    ", "zz = 2\n"], 6),
    (["if x: y\n", "zz = 1\n"], 6),
    # Calls: single names join, larger arguments open units; no unit is the bracket or keyword alone.
    (["ff(x, ", "y, ", "gg + hh)\n"], 5),
    (["return ", "aa + bb"], 5),
    # A list of single tokens is cut where the unit is full.
    (["[1,2,", "3,4,", "5,6]"], 4),
    # Decorators belong to their function; comments of their own lines open units, others do not.
    (["@dec\n", "def ff(", "x):\n    ", "pass\n"], 4),
    (["a = 1  # one\n", "# two\n", "b = 2\n"], 3),
    # A string is one expression, and so is an f-string.
    (["ss = ", "'a long text. Of two.'\n"], 4),
    (["ss = ", "f'{aa + bb} and {cc}'\n"], 4),
    # Characters of several bytes before a node.
    (["é = 'ü🙂'; ", "bb = 'é'"], 6),
]


@pytest.mark.parametrize(("expected", "max_tokens"), GOLDEN)
def test_golden_code(expected, max_tokens):
    assert units("".join(expected), max_tokens) == expected


INCOMPLETE = [
    # Cut in an expression, in a string, in a bracket many lines back, after a colon.
    ["import os\n", "def f(x):\n  ", "return x\n", "print(f(2\n"],
    ["import os\n", "x = 'not en"],
    ["aa = 1\n", "bb = [1,\n ", "2,\n ", "3"],
    ["aa = 1\n", "for i in aa:\n"],
    # A line in the middle that is no Python: what follows goes by line.
    ["aa = 1\n", "this is not\n", "bb = 2; cc = 3\n", "d = 4"],
]


@pytest.mark.parametrize("expected", INCOMPLETE)
def test_unfinished_code_is_parsed_as_far_as_it_goes_and_then_cut_by_line(expected):
    assert units("".join(expected), 9) == expected


def test_prose_around_fences_goes_by_sentence():
    expected = [
        "Sure! ", "It is e.g. this:\n\n", "```python\nxx = 1\n", "yy = 22\n```\n\n", "That prints. ", "Bye.\n",
        "```sh\npip install a; b\n", "ls. ls\n```",
    ]  # fmt: skip
    assert units("".join(expected), 6) == expected
    assert units("x = 1. No\n```\naa = 1\n  bb = 2", 6) == ["x = 1. ", "No\n", "```\naa = 1\n  ", "bb = 2"]


def test_code_that_is_indented_as_a_whole():
    expected = ["1. Like so:\n   ", "```py\n   aa = 1\n   ", "if a:\n      ", "bb = 2\n   ```\n", "Yes."]
    assert units("".join(expected), 6) == expected


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        ("x = foo(bar, baz)", True),
        ("import os\nfor i in", True),  # cut short
        ("Title: something. Other thing", False),
        ('Title: "Cryptowave"\n\nIn a world of code. It was.', False),
        ("Yes\nIt is so. It is.", False),
        ("# A heading\n\nSome prose. More.", False),
        ("", False),
    ],
)
def test_a_response_without_fences_is_code_if_it_is_python(text, is_code):
    from segrew.sentences import sentence_starts

    places = [(i, i + 1) for i in range(len(text))]
    by_sentence = code_starts(ResponseText(text, places), 3) == sentence_starts(text)
    assert by_sentence != is_code


PIECES = [
    "def f(x):\n", "  return x\n", "x = 1\n", "```\n", "(", "]", "'", '"""', "# c\n", "é🙂", "\r\n", "\x0c", "\x00",
    "\\\n", ";", "@d\n", "if a:\n", "\n\n", "f'{x}'", "Hello. You! ", "1. ", "\t", "\u2028", "lambda: 0", "x:y\n",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(1, 9))
def test_no_text_is_too_odd(text, max_tokens):
    starts = code_starts(ResponseText(text, [(i, i + 1) for i in range(len(text))]), max_tokens)
    assert starts == sorted(set(starts)) and all(not text[start].isspace() for start in starts)


def test_deep_nesting_is_no_crash():
    assert units("(" * 400 + ")" * 400, 5)[0][0] == "("
    assert len(units("x = " + "+".join(["ab"] * 2000), 5)) > 300
