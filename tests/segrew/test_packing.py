"""The flat layout: each prompt once, every token in place, and nothing lost."""

import pytest
import torch

from segrew.packing import lay_out, padded_groups

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10], [5, 6, 7], [8, 9]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 17, 2], [18], [19, 20, 2], [], [21, 2]]


def test_each_prompt_once_with_the_responses_to_it_behind():
    rows = lay_out(PROMPTS, RESPONSES)
    assert rows.ids == [5, 6, 7, 11, 12, 2, 18, 8, 9, 13, 14, 15, 16, 17, 2, 21, 2, 10, 19, 20, 2]
    assert rows.positions == [0, 1, 2, 3, 4, 5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 0, 1, 2, 3]
    assert rows.row_of == [-1, -1, -1, 0, 0, 0, 2, -1, -1, 1, 1, 1, 1, 1, 1, 5, 5, -1, 3, 3, 3]
    assert rows.prompt_of == [0] * 7 + [1] * 10 + [2] * 4
    assert rows.longest == 8 and [rows.ids[i] for i in rows.prompt_last] == [7, 9, 7, 10, 7, 9]
    for start, response in zip(rows.starts, RESPONSES, strict=True):
        assert rows.ids[start : start + len(response)] == response


def test_filling_up_adds_a_row_that_changes_nothing_before_it():
    plain, filled = lay_out(PROMPTS, RESPONSES), lay_out(PROMPTS, RESPONSES, multiple=16)
    assert len(filled.ids) == 32 == len(filled.positions) == len(filled.row_of) == len(filled.prompt_of)
    assert filled.ids[:21] == plain.ids and filled.starts == plain.starts and filled.blocks[:-1] == plain.blocks
    assert filled.prompt_of[21:] == [-1] * 11 and filled.positions[21:] == list(range(11))
    assert lay_out([[1]], [[2]], multiple=2).ids == [1, 2]


@pytest.mark.parametrize("sizes", [[3], [4, 4, 4], [1, 90, 2, 80, 3], [7, 1, 1, 1, 1, 1, 1], list(range(1, 40))])
def test_padded_groups_hold_each_row_once_and_no_more_than_all_rows_unpadded(sizes):
    groups = list(padded_groups(sizes))
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    for group in groups:
        assert len(group) * max(sizes[row] for row in group) <= sum(sizes)
    ordered = [sizes[row] for group in groups for row in group]
    assert ordered == sorted(sizes, reverse=True)
    assert len(list(padded_groups([4, 4, 4]))) == 1


def test_random_layouts_hold_every_row_in_order():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        numbers = torch.randint(1, 5, (12,), generator=draw).tolist()
        prompts = [[n] * n for n in numbers]
        responses = [list(range(10, 10 + n)) for n in torch.randint(0, 6, (12,), generator=draw).tolist()]
        rows = lay_out(prompts, responses)
        assert len(rows.ids) == sum(set(numbers)) + sum(map(len, responses))
        for i in range(12):
            stop, last = rows.starts[i] + len(responses[i]), rows.prompt_last[i]
            first = last + 1 - len(prompts[i])
            assert rows.ids[first : last + 1] + rows.ids[rows.starts[i] : stop] == prompts[i] + responses[i]
            assert rows.positions[first : last + 1] == list(range(len(prompts[i])))
            assert rows.positions[rows.starts[i] : stop] == [len(prompts[i]) + j for j in range(len(responses[i]))]
