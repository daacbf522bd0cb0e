import pytest
import torch

from segrew.units import Segmentation

# Row 0 right-padded, row 1 left-padded, row 2 empty, row 3 full.
IDS = torch.tensor([[0, 0, 1, 2, 2, -1], [-1, -1, 0, 1, 1, 1], [-1, -1, -1, -1, -1, -1], [0, 1, 1, 2, 3, 3]])


def test_every_field_by_hand():
    units = Segmentation(IDS)
    assert units.size == 4
    assert units.counts.tolist() == [3, 2, 0, 4]
    assert units.mask.sum(1).tolist() == [5, 4, 0, 6]
    assert units.unit_mask.tolist() == [
        [True, True, True, False],
        [True, True, False, False],
        [False] * 4,
        [True] * 4,
    ]
    assert units.starts.tolist() == [[0, 2, 3, 0], [2, 3, 0, 0], [0, 0, 0, 0], [0, 1, 3, 4]]
    assert units.ends.tolist() == [[1, 2, 4, 0], [2, 5, 0, 0], [0, 0, 0, 0], [0, 2, 3, 5]]
    assert units.lengths.tolist() == [[2, 1, 2, 0], [1, 3, 0, 0], [0, 0, 0, 0], [1, 2, 1, 2]]
    torch.testing.assert_close(
        units.locations,
        torch.tensor([[1 / 3, 2 / 3, 1, 0], [0.5, 1, 0, 0], [0, 0, 0, 0], [0.25, 0.5, 0.75, 1]]),
    )
    assert units.positions.tolist() == [
        [0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 2],
        [0] * 6,
        [0, 0, 1, 0, 0, 1],
    ]
    assert units.unit_lengths.tolist() == [[2, 2, 1, 2, 2, 0], [0, 0, 1, 3, 3, 3], [0] * 6, [1, 2, 2, 1, 2, 2]]
    assert units.first.nonzero().tolist() == [[0, 0], [0, 2], [0, 3], [1, 2], [1, 3], [3, 0], [3, 1], [3, 3], [3, 4]]
    assert units.last.nonzero().tolist() == [[0, 1], [0, 2], [0, 4], [1, 2], [1, 5], [3, 0], [3, 2], [3, 3], [3, 5]]


def test_a_wider_bound_only_adds_padding():
    tight, wide = Segmentation(IDS), Segmentation(IDS, bound=9)
    for field in ("unit_mask", "starts", "ends", "lengths", "locations"):
        narrow, padded = getattr(tight, field), getattr(wide, field)
        assert torch.equal(narrow, padded[:, :4]) and not padded[:, 4:].any()
    assert torch.equal(tight.counts, wide.counts)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([0, -1, 1, -1], "row 1 has a hole"),
        ([-1, 1, 1, 2], "row 1 does not begin with unit 0"),
        ([0, 2, 2, -1], "row 1 has units out of order"),
        ([0, 1, 0, -1], "row 1 has units out of order"),
        ([0, 1, -100, -1], "row 1 has an id below -1"),
    ],
)
def test_faulty_ids_are_refused_with_the_row(row: list[int], fault: str):
    with pytest.raises(ValueError, match=fault):
        Segmentation(torch.tensor([[0, 0, 1, 1], row]))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_at_all_is_a_valid_batch(shape: tuple[int, int]):
    units = Segmentation(torch.full(shape, -1))
    assert units.counts.tolist() == [0] * shape[0]
    assert units.ends.shape == units.locations.shape == (shape[0], units.size)


def test_select_takes_rows_in_order():
    chosen = Segmentation(IDS).select(torch.tensor([3, 0]))
    assert torch.equal(chosen.ids, IDS[[3, 0]]) and chosen.counts.tolist() == [4, 3]
