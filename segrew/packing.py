"""How rows are laid out for a pass: flat, without padding and with equal prompts once, or padded in groups."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Queries [start, stop) see the keys [prompt_start, prompt_stop), and causally themselves."""

    start: int
    stop: int
    prompt_start: int
    prompt_stop: int


@dataclass(frozen=True)
class PackedRows:
    """Rows laid out flat.

    Args:
        ids, positions: of every token; positions count within a row.
        prompt_of, row_of: number of a token's prompt, and of its row, which is -1 in a prompt.
        blocks: who sees whom. starts: index of each row's first response token. prompt_last: of its last prompt token.
        longest: tokens of the longest row. masks: FlexAttention's block masks by window, made when first asked for.
    """

    ids: list[int]
    positions: list[int]
    prompt_of: list[int]
    row_of: list[int]
    blocks: list[Block]
    starts: list[int]
    prompt_last: list[int]
    longest: int
    masks: dict[int | None, Any] = field(default_factory=dict)

    def append(self, ids: list[int], first: int, prompt: int, row: int) -> None:
        """Add tokens whose positions count from `first`."""
        self.ids.extend(ids)
        self.positions.extend(range(first, first + len(ids)))
        self.prompt_of.extend([prompt] * len(ids))
        self.row_of.extend([row] * len(ids))


def lay_out(prompts: list[list[int]], responses: list[list[int]], *, multiple: int = 1) -> PackedRows:
    """Lay rows out flat: each different prompt once, and behind it the responses to it.

    Args:
        multiple: fill up to a multiple of this many tokens, with a row of its own that nobody reads.
    """
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    flat = PackedRows([], [], [], [], [], [0] * len(prompts), [0] * len(prompts), longest)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    for number, (shared, rows) in enumerate(rows_of.items()):
        begin, end = len(flat.ids), len(flat.ids) + len(shared)
        flat.append(list(shared), 0, number, -1)
        for k, row in enumerate(rows):
            flat.starts[row], flat.prompt_last[row] = len(flat.ids), end - 1
            first_query = begin if k == 0 else len(flat.ids)  # the prompt runs with its first response
            flat.append(responses[row], len(shared), number, row)
            flat.blocks.append(Block(first_query, len(flat.ids), begin, begin if k == 0 else end))
    fill = -len(flat.ids) % multiple
    if fill:
        flat.blocks.append(Block(len(flat.ids), len(flat.ids) + fill, 0, 0))
        flat.append([0] * fill, 0, -1, -1)
    return flat


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
