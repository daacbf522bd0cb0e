"""Where sentences begin in a response: prose through `sentencex`, lists by item, code by line."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sentencex import segment

_FENCE = re.compile(r"[ \t]*(?:(`{3,})([^`\n]*)|(~{3,})([^\n]*))$")
_MARKER = re.compile(r"\s*(?:(?:[-*+•>]|#{1,6}|\(?(?:\d{1,3}|[A-Za-z])[.)])[ \t]+)*")
_CLOSING = re.compile(r"[*_\"'”’»)\]]+(?=\s|$)|\[\d+\](?=\s|$)")


@dataclass(frozen=True)
class Block:
    """A stretch of prose or of fenced code, characters [start, end) of a text.

    Args:
        code: the characters between the fences; None in prose.
        language: what the fence names, in lower case.
    """

    start: int
    end: int
    code: tuple[int, int] | None = None
    language: str = ""


def lines_of(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the lines of a stretch as characters [start, end), the line break included."""
    end = len(text) if end is None else end
    while start < end:
        stop = text.find("\n", start, end) + 1 or end
        yield start, stop
        start = stop


def blocks_of(text: str) -> Iterator[Block]:
    """Split Markdown into prose and fenced code; a fence that is never closed runs to the end."""
    begin, opened = 0, None  # of the block; (fence, language, where its code begins)
    for start, end in lines_of(text):
        found = _FENCE.match(text[start:end].rstrip())
        if found is None:
            continue
        fence, info = (found[1], found[2]) if found[1] else (found[3], found[4])
        if opened is None:
            if start > begin:
                yield Block(begin, start)
            begin, opened = start, (fence, (info.split() or [""])[0].lower(), end)
        elif fence.startswith(opened[0]) and not info.strip():
            yield Block(begin, end, (opened[2], start), opened[1])
            begin, opened = end, None
    if opened is not None:
        yield Block(begin, len(text), (opened[2], len(text)), opened[1])
    elif begin < len(text):
        yield Block(begin, len(text))


def line_starts(text: str, start: int, end: int) -> list[int]:
    """Return the first character of each line that is not blank."""
    bare = [(stop, text[begin:stop].lstrip()) for begin, stop in lines_of(text, start, end)]
    return [stop - len(line) for stop, line in bare if line]


def prose_starts(text: str, start: int, end: int, language: str) -> list[int]:
    """Return where sentences begin in a stretch of prose. A line break ends a sentence, as in 2410.02743's code."""
    starts: list[int] = []
    for begin, stop in lines_of(text, start, end):
        if not text[begin:stop].strip():
            continue
        found = _MARKER.match(text[begin:stop])
        place = begin + (found.end() if found else 0)
        first = len(starts)
        # The splitter fails on white space beyond ASCII, of which it needs no more than that it is white.
        for sentence in segment(language, re.sub(r"\s", " ", text[place:stop])):
            opening = _opening(sentence)
            if opening is not None:
                starts.append(place + opening)
            place += len(sentence)
        starts[first : first + 1] = line_starts(text, begin, stop)  # with its marker
    return starts


def _opening(sentence: str) -> int | None:
    """Where what the splitter cut off begins, without marks that close the sentence before; None if nothing is left."""
    begin = len(sentence) - len(sentence.lstrip())
    while found := _CLOSING.match(sentence, begin):
        begin = found.end() + len(sentence[found.end() :]) - len(sentence[found.end() :].lstrip())
    return begin if re.search(r"\w", sentence[begin:]) else None


def block_starts(
    text: str,
    language: str,
    code_starts: Callable[[Block], list[int]],
) -> list[int]:
    """Return where units begin in Markdown: sentences of its prose, and what `code_starts` says of fenced code.

    A fence opens a unit with the first line of code; the closing one belongs to the unit before it.
    """
    starts: list[int] = []
    for block in blocks_of(text):
        if block.code is None:
            starts += prose_starts(text, block.start, block.end, language)
        else:
            starts += [*line_starts(text, block.start, block.code[0]), *code_starts(block)[1:]]
    return starts


def sentence_starts(text: str, language: str = "en") -> list[int]:
    """Return the first character of each sentence; of fenced code, of each line."""

    def lines(block: Block) -> list[int]:
        assert block.code is not None
        return line_starts(text, *block.code)

    return block_starts(text, language, lines)
