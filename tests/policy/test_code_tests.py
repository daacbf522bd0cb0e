"""APPS's tests as they are written, programs in chat answers, and what counts as the same output."""

import json

import pytest

from policy.code_tests import ProgramTests, extract_program, same_text, same_value


def test_the_three_ways_to_write_tests_are_one():
    tests = {"inputs": ["1\n2\n", ""], "outputs": ["3\n", "0"]}
    lines = {"inputs": [["1", "2"], []], "outputs": [["3\n"], ["0"]]}
    read = ProgramTests.read(tests)
    assert read == ProgramTests.read(json.dumps(tests)) == ProgramTests(["1\n2\n", ""], ["3\n", "0"])
    assert ProgramTests.read(lines).inputs == ["1\n2\n", "\n"] and ProgramTests.read(lines).outputs == ["3\n", "0\n"]
    assert ProgramTests.read({"inputs": [[1]], "outputs": [2], "fn_name": "f"}).fn_name == "f"


@pytest.mark.parametrize(
    "column, message",
    [
        ("", "no tests"),
        (None, "no tests"),
        ({}, "no tests"),
        ('{"inputs": [], "outputs": []}', "no tests"),
        ("{", "not valid JSON"),
        ("[1]", "lists 'inputs' and 'outputs'"),
        ({"inputs": ["1"]}, "lists 'inputs' and 'outputs'"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs for 1 outputs"),
        ({"inputs": [3], "outputs": ["1"]}, "text or lists of lines, not 3"),
        ({"inputs": ["3"], "outputs": [1], "fn_name": "f"}, "list of arguments"),
    ],
)
def test_what_cannot_be_tested_is_refused_with_its_place(column, message):
    with pytest.raises(ValueError, match=rf"^row 7: .*{message}"):
        ProgramTests.read(column, "row 7")


@pytest.mark.parametrize(
    "answer, program",
    [
        ("print(1)\n", "print(1)\n"),
        ("Sure:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nRun it:\n```bash\npython a.py\n```", "print(1)\n"),
        ("```cpp\nint main;\n```", "int main;\n"),
        ("```Python title=a.py\nprint(1)\nfor i in", "print(1)\nfor i in"),
        ("```python\nprint(1)\n```\n```python\nprint(2", "print(2"),
        ("1. Like this:\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("```python\r\nprint(1)\r\n```", "print(1)\r\n"),
        ("Use ```x``` here.\n```print(1)```", "Use ```x``` here.\n```print(1)```"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_program_of_an_answer(answer, program):
    assert extract_program(answer) == program


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1   2 \n\n3\n\n", "1 2\n3\n", True),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("1\n2", "1 2", False),
        ("", "", True),
        ("", "0", False),
        ("YES", "Yes", False),
        ("0.3333333", "0.333333333333", True),
        ("0.3334", "0.333333333333", False),
        ("5.0", "5", True),
        ("5", "5.0", True),
        ("007", "7", True),
        ("1000000006", "1000000007", False),
        ("1000000006.0", "1000000007", False),
        ("1.5e3", "1500.0", True),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("1e999", "4", False),
        ("4.0000001", "4", False),
        ("2 1", "1 2", False),
        ("1" * 5000, "1" * 4999 + "2", False),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000, "7", False),
        ("7", "1" * 5000, False),
        ("1" * 500 + ".0", "1" * 500, False),
    ],
)
def test_texts_are_compared_word_by_word(output, expected, same):
    assert same_text(output, expected) is same


@pytest.mark.parametrize(
    "value, expected, same",
    [
        ([1, [2, "a"]], [1, [2, "a"]], True),
        ([1, 2], [1, 2, 3], False),
        ([1, 2, 3], [1, 2], False),
        (0.1 + 0.2, 0.3, True),
        (4.001, 4.0, False),
        ([{"a": 1.0000001}], [{"a": 1.0}], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (5.0, 5, True),
        (1000000006.0, 1000000007, False),
        (1000000006, 1000000007, False),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (float(3**200), 3**200, False),
        (4.0000001, 4, False),
        (3.9999999999, 4, True),
        (float("inf"), 4, False),
        (float("inf"), float("inf"), True),
        (float("nan"), 4, False),
        (4.0, float("inf"), False),
        (True, 1, True),
        ("1", 1, False),
        (None, 0, False),
        (None, None, True),
        ([], {}, False),
        (5, [5], False),
    ],
)
def test_values_are_compared_as_they_are(value, expected, same):
    assert same_value(value, expected) is same


def test_return_values_in_lists_of_their_own_are_unwrapped_only_where_all_are():
    wrapped = ProgramTests([[1], [2]], [[True], [[3]]], "f")
    assert wrapped.matches(0, b"true") and wrapped.matches(0, b"[true]") and wrapped.matches(1, b"[3]")
    plain = ProgramTests([[1], [2]], [[1], [2, 3]], "f")
    assert plain.matches(0, b"[1]") and not plain.matches(0, b"1")


@pytest.mark.parametrize("output", [b"", b"{", b"[" * 100_000, b"9" * 5000, b"\xff"])
def test_what_is_no_value_matches_nothing(output):
    assert not ProgramTests([[1]], [7], "f").matches(0, output)
