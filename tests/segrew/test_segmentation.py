import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from segrew.segmentation import (
    Segmentation,
    SegmentationConfig,
    join_stop,
    read_columns,
    segment,
    segment_by_boundaries,
    segment_by_entropy,
    segment_by_ngram,
    segment_by_perplexity,
    segment_by_random_ngram,
    segment_by_response,
    segment_by_spans,
    segment_by_token,
)

NAN, INF = float("nan"), float("inf")


def full(length: int) -> torch.Tensor:
    return torch.ones(1, length, dtype=torch.bool)


def unit_lengths(units: Segmentation, row: int = 0) -> list[int]:
    return units.lengths[row, : units.counts[row]].tolist()


def shifted(after: list[float]) -> list[float]:
    """Entropies after each token, as the papers index them, to entropies that produced each token."""
    return [0.0, *after[:-1]]


# (H after each token, tokens, threshold or rule, ends) of the official segmenter. Its row of a stop token alone
# ends at −1: a zero-length segment that wraps around to the last column. Ours is one unit at the stop token.
OFFICIAL = [
    ([0.1, 3, 0.1, 0.1, 3, 0.2], 6, 2.0, [1, 4]),
    ([0.1, 3, 0.1, 0.1, 3, 9], 6, 2.0, [1, 4]),
    ([0.1, 3, 0.1, 0.1, 0.1, 9], 6, 2.0, [1, 4]),
    ([0.1] * 6, 6, 2.0, [4]),
    ([0.1] * 6, 6, 0.0, [0, 1, 2, 3, 4]),
    ([0.1, 3, 0.1, 0.1, 3, 0.2], 6, 999.0, [4]),
    ([2.0] * 6, 6, 2.0, [4]),
    ([0.1, 3, 0.1, 0.1, 9, 9, 9, 9], 4, 2.0, [1, 2]),
    ([3.0, 3.0], 2, 2.0, [0]),
    ([3.0], 1, 2.0, [0]),
    ([0, 0.1, 0, 0.1, 0.1, 0.1], 6, 0.0, [1, 3, 4]),
]


@pytest.mark.parametrize(("after", "tokens", "threshold", "ends"), OFFICIAL)
@pytest.mark.parametrize("offset", [0, 3])
def test_golden_ends_of_the_official_segmenter(after, tokens, threshold, ends, offset):
    """Invariants 4 and 38."""
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, offset : offset + tokens] = True
    entropy = torch.full((1, 12), NAN)
    entropy[0, offset : offset + len(after)] = torch.tensor(shifted(after))
    ended = torch.tensor([True])
    units = join_stop(segment_by_entropy(entropy, mask, threshold=threshold), ended)
    columns = read_columns(units, ended, "content")[0, : units.counts[0]] - offset
    assert columns.tolist() == ends


@pytest.mark.parametrize(("after", "tokens", "threshold", "ends"), OFFICIAL)
def test_golden_compat_leaves_the_stop_token_out_of_every_unit(after, tokens, threshold, ends):
    """Invariant 38."""
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, :tokens] = True
    entropy = torch.zeros(1, 9)
    entropy[0, : len(after)] = torch.tensor(shifted(after))
    config = SegmentationConfig(threshold=threshold, compat="dense_rlhf_release")
    units = segment(config, mask, entropy=entropy, ended=torch.tensor([True]))
    assert units.ends[0, : units.counts[0]].tolist() == ends
    assert units.mask.sum().item() == max(1, tokens - 1) and units.lengths.sum().item() == max(1, tokens - 1)
    cut_off = segment(config, mask, entropy=entropy, ended=torch.tensor([False]))
    assert torch.equal(cut_off.ids, segment_by_entropy(entropy, mask, threshold=threshold).ids)


def test_golden_compat_of_one_response_is_read_at_the_stop_token():
    config = SegmentationConfig(rule="response", compat="dense_rlhf_release")
    units = segment(config, full(6), ended=torch.tensor([True]))
    assert units.ends.tolist() == [[5]]


def test_compat_is_part_of_the_rule():
    one, other = SegmentationConfig(threshold=1.75), SegmentationConfig(threshold=1.75, compat="dense_rlhf_release")
    identity = {"segmenter": "a", "tokenizer": "b", "read_position": "end"}
    assert one.fingerprint(**identity) != other.fingerprint(**identity)
    assert other.label == "entropy>1.75 as in dense_rlhf_release"
    assert SegmentationConfig.from_dict(other.to_dict()) == other
    with pytest.raises(ValueError, match=r"knows the rules entropy and response, not 'token'.*threshold 0"):
        SegmentationConfig(rule="token", compat="dense_rlhf_release")
    with pytest.raises((ValueError, TypeCheckError), match="other"):
        SegmentationConfig.from_dict({"compat": "other", "threshold": 1})


def test_golden_sentinel_1000_is_the_response_rule_read_at_the_stop_token():
    """Invariant 38."""
    units = segment_by_response(full(6))
    assert read_columns(units, torch.tensor([True]), "end").tolist() == [[5]]


def test_golden_figure_of_the_paper():
    words = [1.58, 1.46, 1.44, 1.55, 1.45, 1.40, 1.46, 1.42, 1.59, 1.33, 1.35, 1.61, 1.43, 1.40, 1.34]
    units = segment_by_entropy(torch.tensor([words]), full(15), threshold=1.5)
    assert unit_lengths(units) == [3, 5, 3, 4]  # A banana is | both a fruit with seed | and a herb | with a …


def test_spike_opens_a_unit_exactly_at_the_token_it_produced():
    for column in range(1, 8):
        units = segment_by_entropy(torch.eye(8)[column : column + 1], full(8), threshold=0.5)
        assert units.starts.tolist() == [[0, column]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(-1, 7), st.integers(0, 7))
def test_entropy_rule_counts_and_nests(entropy: list[int], low: int, more: int):
    """Invariants 2 and 3."""
    low_units, high_units = (
        segment_by_entropy(torch.tensor([entropy]).float(), full(len(entropy)), threshold=float(c))
        for c in (low, low + more)
    )
    assert low_units.counts.item() == 1 + sum(h > low for h in entropy[1:])
    starts = [set(units.starts[0, : units.counts[0]].tolist()) for units in (low_units, high_units)]
    assert starts[1] <= starts[0]
    assert low >= 0 or low_units.counts.item() == len(entropy)


def test_infinite_threshold_is_the_response_rule():
    """Invariant 3."""
    entropy = torch.rand(1, 9) * 10
    assert torch.equal(segment_by_entropy(entropy, full(9), threshold=INF).ids, segment_by_response(full(9)).ids)


def every_rule(mask: torch.Tensor, signal: torch.Tensor) -> dict[str, Segmentation]:
    draw = torch.Generator().manual_seed(5)
    lengths = mask.sum(1).tolist()
    return {
        "entropy": segment_by_entropy(signal, mask, threshold=1.0),
        "token": segment_by_token(mask),
        "response": segment_by_response(mask),
        "ngram": segment_by_ngram(mask, 3),
        "ngram per row": segment_by_ngram(mask, torch.arange(1, len(mask) + 1)),
        "random_ngram": segment_by_random_ngram(mask, repeats=1, generator=draw),
        "reshuffle": segment_by_random_ngram(
            mask, lengths=(1, 2), repeats=1, when_exhausted="reshuffle", generator=draw
        ),
        "perplexity": segment_by_perplexity(-signal, mask),
        "spans": segment_by_spans([[(0, n // 2 + 1)] if n else [] for n in lengths], mask),
        "boundaries": segment_by_boundaries(signal > 1, mask),
        "probabilities": segment_by_boundaries(signal / 2, mask),
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_rule_partitions_and_ignores_padding(data):
    """Invariant 1. Units are non-empty runs that tile the response; padding changes no boundary."""
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    width = 10
    values = torch.rand(len(lengths), width, generator=torch.Generator().manual_seed(sum(lengths))) * 2
    columns = torch.arange(width)
    right = columns < torch.tensor(lengths)[:, None]
    left = torch.arange(width + 4) >= width + 4 - torch.tensor(lengths)[:, None]
    shifted_values = torch.full((len(lengths), width + 4), NAN).masked_scatter(left, values[right])
    for name, units in every_rule(right, values).items():
        moved = every_rule(left, shifted_values)[name]
        for row, length in enumerate(lengths):
            sizes = unit_lengths(units, row)
            assert sum(sizes) == length and all(sizes), name
            runs = [unit for unit, size in enumerate(sizes) for _ in range(size)]
            assert units.ids[row, :length].tolist() == runs and (units.ids[row, length:] == -1).all(), name
            assert unit_lengths(moved, row) == sizes, name


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [1] * 6), (2, [2, 2, 2]), (3, [3, 3]), (4, [4, 2]), (5, [5, 1]), (6, [6]), (9, [6])]
)
def test_ngram_lengths(n: int, expected: list[int]):
    """Invariant 8."""
    assert unit_lengths(segment_by_ngram(full(6), n)) == expected


def test_ngram_takes_a_length_for_each_row_or_none():
    mask = full(6).expand(3, 6)
    units = segment_by_ngram(mask, torch.tensor([1, 4, 6]))
    assert [unit_lengths(units, row) for row in range(3)] == [[1] * 6, [4, 2], [6]]
    assert unit_lengths(segment_by_ngram(full(6), None)) == [6]
    with pytest.raises(ValueError, match="n 0 must be at least 1"):
        segment_by_ngram(full(6), 0)


def test_random_ngram_deals_the_whole_deck_and_leaves_one_remainder():
    """Invariant 8."""
    mask = full(80).expand(5, 80)
    units = segment_by_random_ngram(mask, generator=torch.Generator().manual_seed(0))
    deals = [unit_lengths(units, row) for row in range(5)]
    assert all(sorted(deal[:12]) == sorted([2, 3, 5, 10] * 3) and deal[12:] == [20] for deal in deals)
    assert len({tuple(deal) for deal in deals}) == 5
    again = segment_by_random_ngram(mask, generator=torch.Generator().manual_seed(0))
    other = segment_by_random_ngram(mask, generator=torch.Generator().manual_seed(1))
    assert torch.equal(units.ids, again.ids) and not torch.equal(units.ids, other.ids)


def test_random_ngram_reshuffles_when_exhausted():
    units = segment_by_random_ngram(
        full(15), lengths=(2, 3), repeats=1, when_exhausted="reshuffle", generator=torch.Generator().manual_seed(0)
    )
    sizes = unit_lengths(units)
    assert [sorted(sizes[i : i + 2]) for i in (0, 2, 4)] == [[2, 3]] * 3 and len(sizes) == 6


def running_mean_cuts(nll: list[float]) -> list[int]:
    starts, unit = [0], [nll[0]]
    for j, now in enumerate(nll[1:], 1):
        if now * len(unit) > sum(unit):
            starts.append(j)
            unit = []
        unit.append(now)
    return starts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_perplexity_rule_equals_a_loop(nll: list[int]):
    """Invariant 9. Eighths of a nat: whole-number sums in the loop, so that a tie is a tie."""
    units = segment_by_perplexity(-torch.tensor([nll]) / 8, full(len(nll)))
    assert units.starts[0, : units.counts[0]].tolist() == running_mean_cuts([float(x) for x in nll])


def test_perplexity_example_cuts_before_the_first_rise():
    units = segment_by_perplexity(-torch.tensor([[5.0, 3, 2, 9, 4, 1]]), full(6))
    assert units.starts.tolist() == [[0, 3]]  # the released code cuts before the 2


def test_equal_perplexities_never_look_like_a_rise():
    assert segment_by_perplexity(torch.full((1, 999), -0.1), full(999)).counts.item() == 1


def test_spans_open_units_and_gaps_join_the_unit_before():
    mask = torch.tensor([[True] * 6, [False, False, True, True, True, True], [False] * 6])
    units = segment_by_spans([[(1, 2), (4, 6)], [(0, 1), (1, 4)], []], mask)
    assert units.ids.tolist() == [[0, 1, 1, 1, 2, 2], [-1, -1, 0, 1, 1, 1], [-1] * 6]


@pytest.mark.parametrize("spans", [[(0, 7)], [(2, 4), (3, 5)], [(2, 2)], [(-1, 2)], [(3, 4), (0, 1)]])
def test_faulty_spans_name_the_row(spans):
    with pytest.raises(ValueError, match="row 0"):
        segment_by_spans([spans], full(6))


def test_a_mask_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="row 1 has a hole"):
        segment_by_token(torch.tensor([[True, True, True], [True, False, True]]))


def test_join_stop_and_read_columns_by_hand():
    ids = torch.tensor(
        [
            [0, 0, 1, 2, -1],  # stop token alone: joins unit 1
            [0, 0, 1, 1, -1],  # stop token in a unit already
            [-1, -1, -1, 0, 1],  # left-padded
            [0, -1, -1, -1, -1],  # nothing but the stop token
            [0, 0, 1, 1, 2],  # truncated: no stop token
            [-1, -1, -1, -1, -1],
            [0, 1, 1, 1, -1],  # truncated inside a longer unit
        ]
    )
    ended = torch.tensor([True, True, True, True, False, True, False])
    units = join_stop(Segmentation(ids), ended)
    assert units.ids[0].tolist() == [0, 0, 1, 1, -1] and units.ids[2].tolist() == [-1, -1, -1, 0, 0]
    assert torch.equal(units.ids[[1, 3, 4, 5, 6]], ids[[1, 3, 4, 5, 6]])
    ends = [[1, 3, 0], [1, 3, 0], [4, 0, 0], [0, 0, 0], [1, 3, 4], [0, 0, 0], [0, 3, 0]]
    content = [[1, 2, 0], [1, 2, 0], [3, 0, 0], [0, 0, 0], [1, 3, 4], [0, 0, 0], [0, 3, 0]]
    assert read_columns(units, ended).tolist() == ends
    assert read_columns(units, ended, "content").tolist() == content


def test_b28_a_lone_stop_token_is_one_unit():
    mask = torch.tensor([[True, False, False, False, False]])
    for units in every_rule(mask, torch.rand(1, 5) * 2).values():
        assert join_stop(units, torch.tensor([True])).ids.tolist() == [[0, -1, -1, -1, -1]]
