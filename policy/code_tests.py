"""Programming problems in APPS's form: reading their tests, finding the program in an answer, comparing outputs."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # numpy.allclose, with which APPS compares numbers
DIGITS = 4000  # longer numbers are text: Python itself reads integers of up to 4,300 digits
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*+)[^`]*+")
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class ProgramTests:
    """The tests of a problem.

    Args:
        inputs: texts for standard input, or lists of arguments where there is a `fn_name`.
        outputs: expected standard output, or expected return values.
        fn_name: the function or the method of `Solution` to call; None for programs that read and print.
    """

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None

    @classmethod
    def read(cls, column: Any, where: str = "tests") -> "ProgramTests":
        """Read a dictionary of inputs, outputs and perhaps fn_name, or the same as JSON text.

        Raises:
            ValueError: there are no tests, or they are not of this form; the message begins with `where`.
        """
        if isinstance(column, str) and column.strip():
            try:
                column = json.loads(column)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not valid JSON ({error}).") from None
        if not column:
            raise ValueError(f"{where}: no tests, so nothing can be rewarded; leave this problem out.")
        if not isinstance(column, dict) or not all(isinstance(column.get(k), list) for k in ("inputs", "outputs")):
            raise ValueError(f"{where}: expected an object with the lists 'inputs' and 'outputs'.")
        inputs, outputs, fn_name = column["inputs"], column["outputs"], column.get("fn_name") or None
        if len(inputs) != len(outputs):
            raise ValueError(f"{where}: {len(inputs)} inputs for {len(outputs)} outputs; give one of each for a test.")
        if not inputs:
            raise ValueError(f"{where}: no tests, so nothing can be rewarded; leave this problem out.")
        if fn_name is None:
            return cls([_text(i, where) for i in inputs], [_text(o, where) for o in outputs])
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError(f"{where}: with 'fn_name' ({fn_name}) each input must be a list of arguments.")
        return cls(inputs, outputs, fn_name)

    def matches(self, index: int, output: bytes) -> bool:
        """Whether what a program gave for a test is what was expected."""
        expected = self.outputs[index]
        if self.fn_name is None:
            return same_text(output.decode("utf-8", "replace"), expected)
        try:
            value = json.loads(output, parse_int=lambda digits: int(digits) if len(digits) <= DIGITS else digits)
        except (ValueError, RecursionError):
            return False
        return same_value(value, expected) or (self._wrapped and same_value(value, expected[0]))

    @property
    def _wrapped(self) -> bool:
        """Whether every return value may have been put into a list of its own, as some of APPS are."""
        return all(isinstance(output, list) and len(output) == 1 for output in self.outputs)


def _text(value: Any, where: str) -> str:
    """Standard input or output: text, or a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(line.removesuffix("\n") for line in value) + "\n"
    raise ValueError(f"{where}: without 'fn_name' inputs and outputs are text or lists of lines, not {value!r:.60}.")


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word: spacing and blank lines do not count, numbers need only be close."""
    lines, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    return [len(line) for line in lines] == [len(line) for line in wanted] and all(
        _same_word(a, b) for line, other in zip(lines, wanted, strict=True) for a, b in zip(line, other, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    numbers = _NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)
    if not numbers or len(word) > DIGITS or len(expected) > DIGITS:
        return False
    return _close(*(int(text) if _INTEGER.fullmatch(text) else float(text) for text in (word, expected)))


def same_value(value: Any, expected: Any) -> bool:
    """Compare a returned value with the expected one, both as JSON has them; floats need only be close."""
    if isinstance(expected, list):
        same_length = isinstance(value, list) and len(value) == len(expected)
        return same_length and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return same_keys and all(same_value(value[key], expected[key]) for key in expected)
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return _close(value, expected)
    return value == expected


def _close(number: int | float, expected: int | float) -> bool:
    """Whether |number − expected| ≤ 1e-8 + 1e-5 |expected|; without the second term for an expected integer."""
    if number == expected:
        return True
    if isinstance(expected, int):
        finite = isinstance(number, float) and math.isfinite(number)
        return finite and round(number) == expected and abs(number - round(number)) <= ABSOLUTE
    try:
        return math.isfinite(expected) and abs(number - expected) <= ABSOLUTE + RELATIVE * abs(expected)
    except OverflowError:  # an integer beyond every float
        return False


def extract_program(answer: str) -> str:
    """Find the program in a chat answer.

    It is the last fenced block marked as Python, or else the last unmarked one, or else the last; a block that the
    answer's end cuts off counts. An answer without a fence is a program as a whole.
    """
    blocks: list[tuple[str, list[str]]] = []
    indent, fence = "", ""
    for line in answer.splitlines(keepends=True):
        found = _FENCE.fullmatch(line.rstrip())
        if fence and found and not found[3] and found[2].startswith(fence):
            fence = ""
        elif fence:
            blocks[-1][1].append(line.removeprefix(indent))
        elif found:
            indent, fence = found[1], found[2]
            blocks.append((found[3].lower(), []))
    for wanted in (_PYTHON, ("",)):
        marked = [block for block in blocks if block[0] in wanted]
        if marked:
            return "".join(marked[-1][1])
    return "".join(blocks[-1][1]) if blocks else answer
