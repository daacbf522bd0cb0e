"""Cuts inside characters; the rules themselves are in test_segmentation.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segrew.segmentation import Segmentation, segment_by_boundaries
from segrew.unit_rules import whole_characters


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(0, 3))
def test_b11_cuts_inside_a_character_move_behind_it(tokens, padding):
    """Against a loop over tokens: an opening waits for the next token that begins a character."""
    opens, inside = zip(*tokens, strict=True)
    expected, waiting, unit = [], False, -1
    for j, (opened, continued) in enumerate(tokens):
        waiting = waiting or opened or j == 0
        if waiting and (j == 0 or not continued):
            unit, waiting = unit + 1, False
        expected.append(unit)
    mask = torch.tensor([[False] * padding + [True] * len(tokens)])
    units = segment_by_boundaries(torch.tensor([[False] * padding + list(opens)]), mask)
    moved = whole_characters(units, torch.tensor([list(inside) + [True] * padding]))
    assert moved.ids.tolist() == [[-1] * padding + expected]


def test_fallback_flags_go_along():
    units = Segmentation(torch.tensor([[0, 1], [0, 0]]), fallback=torch.tensor([True, False]))
    moved = whole_characters(units, torch.zeros(2, 2, dtype=torch.bool))
    assert moved.fallback.tolist() == [True, False]
    assert moved.select(torch.tensor([1])).fallback.tolist() == [False]
    assert moved.to("cpu").fallback.tolist() == [True, False]
