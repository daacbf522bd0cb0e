"""How rows are laid out for a pass: flat, without padding and with equal heads once, or padded in groups."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

LEAST_SHARE = 1 / 32  # of a row: to share a shorter head saves less than attention to it costs


class Block(NamedTuple):
    """Queries [start, stop) see the keys of the stretches `before`, and causally themselves."""

    start: int
    stop: int
    before: list[tuple[int, int]]


@dataclass(frozen=True)
class PackedRows:
    """Rows laid out flat, as a tree of prefixes: a head that rows have in common stands once, what follows behind it.

    Args:
        ids, positions: of every token; positions count within a row.
        ends: index behind the last token that sees this one; all from it up to there do.
        blocks: who sees whom. paths: where the tokens of each row are, prompt and response.
        longest: tokens of the longest row. masks: FlexAttention's block masks by window, made when first asked for.
    """

    ids: list[int]
    positions: list[int]
    ends: list[int]
    blocks: list[Block]
    paths: list[list[int]]
    longest: int
    masks: dict[int | None, Any] = field(default_factory=dict)


def lay_out(prompts: list[list[int]], responses: list[list[int]], *, multiple: int = 1) -> PackedRows:
    """Lay rows out flat, in the order of their tokens, each behind what it has in common with the one before.

    Args:
        multiple: fill up to a multiple of this many tokens, with a row of its own that nobody reads.
    """
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    flat = PackedRows([], [], [], [], [[] for _ in rows], max(map(len, rows)))
    last: list[int] = []
    path: list[int] = []

    def append(ids: list[int], shared: int) -> None:
        nonlocal last, path
        start, stop = len(flat.ids), len(flat.ids) + len(ids) - shared
        for place in path[shared:]:  # nothing further sees these
            flat.ends[place] = start
        last, path = ids, [*path[:shared], *range(start, stop)]
        flat.ids.extend(ids[shared:])
        flat.positions.extend(range(shared, len(ids)))
        flat.ends.extend([stop] * (stop - start))
        if stop > start:
            flat.blocks.append(Block(start, stop, stretches(path[:shared])))

    for row in sorted(range(len(rows)), key=rows.__getitem__):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, rows[row], strict=False)))
        append(rows[row], shared if shared >= LEAST_SHARE * len(rows[row]) else 0)
        flat.paths[row] = path
    append([0] * (-len(flat.ids) % multiple), 0)
    return flat


def stretches(path: list[int]) -> list[tuple[int, int]]:
    """The stretches [start, stop) of consecutive numbers that a rising list consists of."""
    breaks = [k for k in range(1, len(path)) if path[k] != path[k - 1] + 1]
    edges = [0, *breaks, len(path)] if path else [0]
    return [(path[first], path[last - 1] + 1) for first, last in pairwise(edges)]


def padded_groups(sizes: list[int]) -> Iterator[list[int]]:
    """Yield rows of similar length; a group, padded, holds no more tokens than all rows do without padding."""
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    group: list[int] = []
    for row in order:
        if group and (len(group) + 1) * sizes[group[0]] > sum(sizes):
            yield group
            group = []
        group.append(row)
    yield group
