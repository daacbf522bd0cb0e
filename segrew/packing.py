"""How rows are laid out for a pass: flat, without padding and with equal heads once, or padded in groups."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import Any, NamedTuple

LEAST_SHARE = 1 / 32  # of a row: to share a shorter head saves less than attention to it costs
Stretch = tuple[int, int]  # [start, stop)


class Block(NamedTuple):
    """Queries [start, stop) see the keys of the stretches `before`, and causally themselves."""

    start: int
    stop: int
    before: list[Stretch]


@dataclass(frozen=True)
class PackedRows:
    """Rows laid out flat, as a tree of prefixes: a head that rows have in common stands once, what follows behind it.

    Args:
        ids, positions: of every token; positions count within a row.
        ends: index behind the last token that sees this one; all from it up to there do.
        blocks: who sees whom. paths: where the tokens of each row are, prompt and response.
        masks: FlexAttention's block masks by window, made when first asked for.
    """

    ids: list[int]
    positions: list[int]
    ends: list[int]
    blocks: list[Block]
    paths: list[list[int]]
    masks: dict[int | None, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.paths))


def lay_out(prompts: list[list[int]], responses: list[list[int]], *, multiple: int = 1) -> PackedRows:
    """Lay rows out flat, in the order of their tokens, each behind what it has in common with the one before.

    Args:
        multiple: fill up to a multiple of this many tokens, with a row of its own that nobody reads.
    """
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    flat = PackedRows([], [], [], [], [[] for _ in rows])
    last: list[int] = []
    path: list[Stretch] = []

    def append(ids: list[int], shared: int) -> None:
        nonlocal last, path
        start, stop = len(flat.ids), len(flat.ids) + len(ids) - shared
        before, left = _split(path, shared)
        for first, end in left:  # nothing further sees these
            flat.ends[first:end] = [start] * (end - first)
        flat.ids.extend(ids[shared:])
        flat.positions.extend(range(shared, len(ids)))
        flat.ends.extend([stop] * (stop - start))
        last, path = ids, before
        if stop > start:
            flat.blocks.append(Block(start, stop, before))
            path = [*before, (start, stop)]

    for row in sorted(range(len(rows)), key=rows.__getitem__):
        shared = in_common(last, rows[row])
        append(rows[row], shared if shared >= LEAST_SHARE * len(rows[row]) else 0)
        flat.paths[row] = list(chain.from_iterable(starmap(range, path)))
    append([0] * (-len(flat.ids) % multiple), 0)
    return flat


def in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest head of both, by comparing slices."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda count: a[:count] != b[:count])


def _split(path: list[Stretch], count: int) -> tuple[list[Stretch], list[Stretch]]:
    """The first `count` places of a path, and the others."""
    head, tail = [], []
    for start, stop in path:
        middle = min(start + max(count, 0), stop)
        if start < middle:
            head.append((start, middle))
        if middle < stop:
            tail.append((middle, stop))
        count -= stop - start
    return head, tail


def padded_groups(sizes: list[int], most: int) -> Iterator[list[int]]:
    """Yield rows of similar length; a group of several, padded, holds no more than `most` tokens."""
    group: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        if group and (len(group) + 1) * sizes[group[0]] > most:
            yield group
            group = []
        group.append(row)
    yield group
