"""The flat layout: common heads once, every token in place, and nothing lost."""

from itertools import pairwise

import pytest
import torch

from segrew.packing import lay_out, padded_groups

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10], [5, 6, 7], [8, 9]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 17, 2], [18], [19, 20, 2], [], [21, 2]]


def check(rows, prompts, responses):
    """Every row stands whole along its path, and exactly its own tokens up to each one are what that one sees."""
    for prompt, response, path in zip(prompts, responses, rows.paths, strict=True):
        assert [rows.ids[i] for i in path] == prompt + response
        assert [rows.positions[i] for i in path] == list(range(len(path)))
        for i, place in enumerate(path):
            assert [k for k in range(place + 1) if place < rows.ends[k]] == path[: i + 1]
    assert [i for block in rows.blocks for i in range(block.start, block.stop)] == list(range(len(rows.ids)))
    for block in rows.blocks:
        seen = [k for k in range(block.start) if block.start < rows.ends[k]]
        assert [k for start, stop in block.before for k in range(start, stop)] == seen
        assert all(a < b <= c < d for (a, b), (c, d) in pairwise([*block.before, block[:2]]))


def test_what_rows_begin_with_alike_stands_once():
    rows = lay_out(PROMPTS, RESPONSES)
    check(rows, PROMPTS, RESPONSES)
    assert rows.ids == [5, 6, 7, 11, 12, 2, 18, 8, 9, 13, 14, 15, 16, 17, 2, 21, 2, 10, 19, 20, 2]
    assert rows.positions == [0, 1, 2, 3, 4, 5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 0, 1, 2, 3]
    assert rows.paths[4] == [0, 1, 2] and rows.paths[2] == [0, 1, 2, 6] and rows.longest == 8


def test_heads_are_shared_across_prompts_and_into_responses():
    prompts, responses = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 4]], [[7, 8, 9], [7], [7, 8, 6], [7]]
    rows = lay_out(prompts, responses)
    check(rows, prompts, responses)
    assert rows.ids == [1, 2, 3, 7, 8, 6, 9, 4, 7] and rows.paths[1] == rows.paths[3] == [0, 1, 7, 8]
    assert [block.before for block in rows.blocks] == [[], [(0, 5)], [(0, 2)]]
    long = [[1, 2, *range(10, 10 + n)] for n in (62, 63)]  # two of 65 tokens are not worth it
    assert [len(lay_out([[1, 2, 3], row], [[], []]).ids) for row in long] == [65, 68]


def test_filling_up_adds_a_row_that_changes_nothing_before_it():
    plain, filled = lay_out(PROMPTS, RESPONSES), lay_out(PROMPTS, RESPONSES, multiple=16)
    assert len(filled.ids) == 32 == len(filled.positions) == len(filled.ends)
    assert filled.ids[:21] == plain.ids and filled.paths == plain.paths and filled.blocks[:-1] == plain.blocks
    assert filled.ends == plain.ends + [32] * 11 and filled.positions[21:] == list(range(11))
    assert lay_out([[1]], [[2]], multiple=2).ids == [1, 2]


@pytest.mark.parametrize("sizes", [[3], [4, 4, 4], [1, 90, 2, 80, 3], [7, 1, 1, 1, 1, 1, 1], list(range(1, 40))])
def test_padded_groups_hold_each_row_once_and_no_more_than_all_rows_unpadded(sizes):
    groups = list(padded_groups(sizes, sum(sizes)))
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    for group in groups:
        assert len(group) * max(sizes[row] for row in group) <= sum(sizes)
    ordered = [sizes[row] for group in groups for row in group]
    assert ordered == sorted(sizes, reverse=True)
    assert [len(list(padded_groups([4, 4, 4], most))) for most in (12, 11, 8, 7, 1)] == [1, 2, 2, 3, 3]


def test_random_layouts_hold_every_row_in_order():
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        lengths = torch.randint(0, 9, (2, 12), generator=draw).tolist()
        prompts, responses = ([torch.randint(1, 3, (n,), generator=draw).tolist() for n in part] for part in lengths)
        rows = lay_out(prompts, responses)
        check(rows, prompts, responses)
        heads = {tuple(row[:n]) for row in map(list.__add__, prompts, responses) for n in range(1, len(row) + 1)}
        assert len(rows.ids) == len(heads)  # short rows: every common head is worth it
