"""Where statements and expressions begin in Python code, also where the code is not finished."""

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from segrew.response_text import ResponseText
from segrew.sentences import Block, block_starts, blocks_of, line_starts, lines_of, prose_starts

_PYTHON = {"", "py", "python", "python3"}
_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_HEADER = "if 1:\n"  # stands before code that is indented as a whole


@dataclass(frozen=True)
class _Code:
    """Code that parses.

    Args:
        body: its statements.
        heads: (line, column) of each logical line, and of each comment on a line of its own.
        lines: (first character in the response, text) of each line, by line number from 1; what stands before the
            response's own lines is no line of the response.
    """

    body: list[ast.stmt]
    heads: list[tuple[int, int]]
    lines: dict[int, tuple[int, str]]

    def range(self, node: ast.AST) -> tuple[int, int] | None:
        """Characters [start, end) of a node, decorators included; None for nodes that have no place."""
        if not isinstance(node, ast.stmt | ast.expr) and not hasattr(node, "end_lineno"):
            return None
        start = self._place(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        decorators = [self._place(one.lineno, one.col_offset) - 1 for one in getattr(node, "decorator_list", [])]
        return min([start, *decorators]), self._place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _place(self, line: int, column: int) -> int:
        start, source = self.lines[line]
        return start + (column if source.isascii() else len(source.encode()[:column].decode()))

    def places_of_heads(self) -> list[int]:
        """The first character of each logical line."""
        return [self.lines[line][0] + column for line, column in self.heads if line in self.lines]


def _logical_lines(source: str) -> Iterator[tuple[int, int]]:
    depth, fresh = 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT:
            fresh = fresh or depth == 0
            continue
        if fresh:
            yield token.start
        fresh = False
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")


def _parse(source: str, offset: int) -> _Code:
    """Parse code whose first character has this place in the response.

    Raises:
        SyntaxError: it is no whole Python code.
    """
    header = _HEADER if source.lstrip("\n")[:1].isspace() else ""
    lines = {
        number: (offset + start, source[start:end])
        for number, (start, end) in enumerate(lines_of(source), 2 if header else 1)
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that the code spells wrong are no concern of ours
            body = ast.parse(header + source).body
        heads = list(_logical_lines(header + source))
    except (tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from None
    return _Code(body[0].body if header else body, heads, lines)  # type: ignore[attr-defined]


def _longest_parsable(source: str, offset: int) -> tuple[_Code | None, int]:
    """Parse the longest run of whole lines that is Python, from the first one on; return it with its length."""
    lines = [source[start:end].replace("\r", " ") for start, end in lines_of(source)]
    count = len(lines)
    while count:
        prefix = "".join(lines[:count])
        try:
            return _parse(prefix, offset), len(prefix)
        except SyntaxError as error:  # an error in line k stands in every prefix that holds line k
            header = prefix.lstrip("\n")[:1].isspace()
            count = min(count, max((error.lineno or 1) - header, 1)) - 1
    return None, 0


def _is_python(text: str) -> bool:
    """Whether a response without fences is code: it parses, or begins with statements that no prose looks like."""
    code, length = _longest_parsable(text, 0)
    if code is None or not code.body:
        return False
    return length == len(text) or not all(isinstance(one, ast.Expr | ast.AnnAssign) for one in code.body)


def _statement_starts(text: ResponseText, code: _Code, max_tokens: int) -> list[int]:
    """Take nodes of at most `max_tokens` tokens from the tree, from the top down.

    A logical line opens a unit, and so does a node of two or more tokens once that unit has a second token. Single
    tokens, and what stands between nodes, join the unit before them, a single node as long as there is room.
    """
    opens: set[int] = set()
    singles: set[int] = set()
    whole: list[tuple[int, int]] = []
    queue: list[ast.AST] = [*code.body]
    while queue:
        node = queue.pop()
        place = code.range(node)
        if place is None:
            queue += ast.iter_child_nodes(node)
            continue
        size = text.count(*place)
        (opens if size > 1 else singles).add(place[0])
        if size <= max_tokens:
            whole.append(place)
        elif not isinstance(node, ast.JoinedStr):  # before Python 3.12 the parts of an f-string have wrong places
            queue += ast.iter_child_nodes(node)
    heads = {head for head in code.places_of_heads() if not any(start < head < end for start, end in whole)}
    starts: list[int] = []
    for begin in sorted(heads | opens | singles):
        length = text.count(starts[-1], begin) if starts else 0
        if not starts or begin in heads or length >= (2 if begin in opens else max_tokens):
            starts.append(begin)
    return starts


def python_starts(text: ResponseText, start: int, end: int, max_tokens: int) -> list[int]:
    """Return where units begin in a stretch of Python: of its longest parsable prefix by the tree, then by line."""
    code, length = _longest_parsable(text.text[start:end], start)
    parsed = [] if code is None else _statement_starts(text, code, max_tokens)
    return [*parsed, *line_starts(text.text, start + length, end)]


def code_starts(text: ResponseText, max_tokens: int, language: str = "en") -> list[int]:
    """Return where units begin in a response of prose and Python.

    Fenced Python is cut by its syntax tree, other fenced code by line, prose by sentence. A response without
    fences is code if it is Python.
    """

    def fenced(block: Block) -> list[int]:
        assert block.code is not None
        if block.language in _PYTHON:
            return python_starts(text, *block.code, max_tokens)
        return line_starts(text.text, *block.code)

    source = text.text
    if any(block.code for block in blocks_of(source)):
        return block_starts(source, language, fenced)
    if _is_python(source):
        return python_starts(text, 0, len(source), max_tokens)
    return prose_starts(source, 0, len(source), language)
