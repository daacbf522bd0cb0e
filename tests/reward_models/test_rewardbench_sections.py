import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models import rewardbench_scores
from reward_models.rewardbench_sections import EXAMPLE_COUNTS, SUBSET_MAPPING


def rows(chosen, rejected, subset="hep-go"):
    return [
        {"id": i, "subset": subset, "score_chosen": c, "score_rejected": r}
        for i, (c, r) in enumerate(zip(chosen, rejected, strict=True))
    ]


def subset_rows(accuracies, n=20):
    """Rows in which each subset has exactly the given accuracy."""
    out = []
    for subset, accuracy in accuracies.items():
        wins = round(accuracy * n)
        assert wins == pytest.approx(accuracy * n)
        out += rows([1.0] * wins + [0.0] * (n - wins), [0.5] * n, subset)
    return out


# Chat, Chat Hard, Safety and Reasoning all at one accuracy each: (c) of B46
FOUR_SECTIONS = {
    name: accuracy
    for section, accuracy in {"Chat": 0.9, "Chat Hard": 0.6, "Safety": 0.8, "Reasoning": 0.75}.items()
    for name in SUBSET_MAPPING[section]
}


def test_constants_add_up_as_published():
    totals = {section: sum(EXAMPLE_COUNTS[n] for n in names) for section, names in SUBSET_MAPPING.items()}
    assert totals == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1968}
    assert sum(len(names) for names in SUBSET_MAPPING.values()) == len(EXAMPLE_COUNTS) == 23


def test_b44_ties_are_no_wins():
    with pytest.warns(UserWarning, match="2 of 4 pairs are ties"):
        result = rewardbench_scores(rows([1, 2, 3, 0], [1, 1, 4, 0]))
    assert result["ties"] == 2
    assert result["subsets"]["hep-go"]["accuracy"] == 0.25
    assert result["pooled"]["n"] == 4


def test_b44_a_constant_scorer_wins_nothing_and_is_warned_about():
    with pytest.warns(UserWarning, match="constant"):
        result = rewardbench_scores(rows([0.0] * 50, [0.0] * 50))
    assert (result["overall"], result["ties"]) == (0.0, 50)


def test_b44_up_to_one_per_cent_of_ties_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rewardbench_scores(rows([1.0] * 99 + [0.0], [0.0] * 100))["ties"] == 1


@pytest.mark.parametrize("bad", [math.nan, None, "high"])
@pytest.mark.parametrize("field", ["score_chosen", "score_rejected"])
def test_b44_a_score_that_is_no_number_names_its_row(field, bad):
    data = rows([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    data[1] |= {"id": "q-17", field: bad}
    with pytest.raises(ValueError, match=rf"row 2 \(id 'q-17', subset 'hep-go'\): {field}"):
        rewardbench_scores(data)


def test_b44_scores_are_compared_before_any_rounding():
    result = rewardbench_scores(rows([1.0 + 1e-12], [1.0]))
    assert (result["overall"], result["ties"]) == (1.0, 0)


def test_b19_swapped_sides_turn_wins_into_losses():
    """Margins +1, +2, -1, 0: two wins, one loss, one tie; the swapped file has one win, two losses, one tie."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight = rewardbench_scores(rows([1.0, 2.0, 0.0, 5.0], [0.0, 0.0, 1.0, 5.0]))["pooled"]
        swapped = rewardbench_scores(rows([0.0, 0.0, 1.0, 5.0], [1.0, 2.0, 0.0, 5.0]))["pooled"]
    assert (straight["accuracy"], straight["ties"]) == (0.5, 1)
    assert (swapped["accuracy"], swapped["ties"]) == (0.25, 1)
    assert straight["accuracy"] + swapped["accuracy"] + straight["ties"] / 4 == 1


def test_b46_a_section_is_weighted_by_fixed_counts():
    accuracies = dict(zip(SUBSET_MAPPING["Chat"], (1, 0.5, 0, 1, 0.25), strict=True))
    # (100·1 + 95·0.5 + 95·0 + 28·1 + 40·0.25) / 358
    assert rewardbench_scores(subset_rows(accuracies))["sections"]["Chat"]["accuracy"] == pytest.approx(
        0.518156, abs=1e-6
    )


def test_b46_mathematics_counts_as_much_as_code():
    accuracies = {name: 0.5 if name == "math-prm" else 1.0 for name in SUBSET_MAPPING["Reasoning"]}
    assert rewardbench_scores(subset_rows(accuracies))["sections"]["Reasoning"]["accuracy"] == pytest.approx(0.75)


def test_b46_total_of_four_sections():
    result = rewardbench_scores(subset_rows(FOUR_SECTIONS))
    assert result["overall"] == pytest.approx(0.7625)
    assert result["section_mean"] == pytest.approx(0.7625)
    assert (result["missing"], result["unmapped"]) == ([], [])


def test_b46_prior_sets_weigh_half():
    prior = dict.fromkeys(["anthropic_helpful", "anthropic_hhh", "shp", "summarize"], 0.7)
    result = rewardbench_scores(subset_rows(FOUR_SECTIONS | prior))
    assert result["sections"]["Prior Sets"]["accuracy"] == pytest.approx(0.7)
    assert result["overall"] == pytest.approx(0.755556, abs=1e-6)
    assert result["section_mean"] == pytest.approx(0.7625)


def test_b46_prior_sets_average_what_is_there_and_ignore_sizes():
    data = rows([1] * 10, [0] * 10, "shp") + rows([0] * 30, [1] * 30, "summarize")
    assert rewardbench_scores(data)["sections"]["Prior Sets"]["accuracy"] == 0.5


def test_b46_an_absent_section_is_missing_not_zero():
    present = {name: a for name, a in FOUR_SECTIONS.items() if name not in SUBSET_MAPPING["Safety"]}
    result = rewardbench_scores(subset_rows(present))
    assert result["missing"] == ["Safety"]
    assert "Safety" not in result["sections"]
    assert result["overall"] == pytest.approx((0.9 + 0.6 + 0.75) / 3)


def test_b46_an_absent_subset_leaves_its_section_and_is_named():
    result = rewardbench_scores(subset_rows({"alpacaeval-easy": 0.5, "mt-bench-med": 1.0}))
    assert result["sections"]["Chat"]["accuracy"] == pytest.approx((100 * 0.5 + 40) / 140)
    assert result["sections"]["Chat"]["missing"] == ["alpacaeval-length", "alpacaeval-hard", "mt-bench-easy"]
    assert result["sections"]["Chat"]["n"] == 40  # what was scored, beside the fixed counts
    assert result["subsets"]["alpacaeval-easy"]["count"] == 100


def test_b46_unknown_subsets_are_listed_and_stay_out_of_the_total():
    result = rewardbench_scores(subset_rows({"hep-go": 1.0, "my-own": 0.5}))
    assert result["unmapped"] == ["my-own"]
    assert result["overall"] == 1.0
    assert result["pooled"]["accuracy"] == 0.75
    assert result["subsets"]["my-own"]["count"] is None


def test_math_prm_has_447_rows_and_weighs_984():
    subset = rewardbench_scores(subset_rows({"math-prm": 1.0, "hep-go": 0.0}))
    assert subset["subsets"]["math-prm"]["count"] == 447
    assert subset["sections"]["Reasoning"]["accuracy"] == pytest.approx(984 / (984 + 164))


def test_only_unknown_subsets_have_no_total():
    result = rewardbench_scores(subset_rows({"my-own": 0.5}))
    assert (result["overall"], result["section_mean"], result["sections"]) == (None, None, {})
    assert result["missing"] == list(SUBSET_MAPPING)


def test_intervals_are_wilsons():
    # 7 of 10, z = 1.959964: the textbook interval
    interval = rewardbench_scores(rows([1] * 7 + [0] * 3, [0] * 7 + [1] * 3))["subsets"]["hep-go"]["ci95"]
    assert interval == pytest.approx([0.396775, 0.892209], abs=1e-5)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=40))
def test_swapping_sides_swaps_wins_and_losses(pairs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight = rewardbench_scores(rows(*zip(*pairs, strict=True)))["pooled"]
        swapped = rewardbench_scores(rows(*list(zip(*pairs, strict=True))[::-1]))["pooled"]
    assert straight["accuracy"] + swapped["accuracy"] + straight["ties"] / len(pairs) == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "message"), [([], "no rows"), ([{"id": 3, "score_chosen": 1}], r"row 1 \(id 3.*subset")]
)
def test_unusable_rows_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        rewardbench_scores(data)


def test_a_subset_listed_twice_under_one_id_counts_each_row():
    assert rewardbench_scores(rows([1], [0]) * 3)["pooled"]["n"] == 3
