"""Outcomes of hand-made verdicts."""

import pytest

from policy.judge_results import agreement, both_orders, verdict_table, verdicts

# (model first, baseline first) as the judge's choice of model, baseline or tie; None: unreadable.
PAIRS = {
    "won": ("model", "model"),
    "won too": ("model", "model"),
    "lost": ("baseline", "baseline"),
    "tied": ("tie", "tie"),
    "first place": ("model", "baseline"),
    "half": ("model", "tie"),
    "half lost": ("tie", "baseline"),
    "unreadable": ("model", None),
}
JUDGMENTS = [
    {"id": name, "order": order, "verdicts": {"fluency": said}, "reply": "…"}
    for order in (0, 1)
    for name, words in PAIRS.items()
    for said in [words[order]]
]


def test_a_win_needs_both_orders():
    assert both_orders(JUDGMENTS, "fluency") == {
        "won": "win",
        "won too": "win",
        "lost": "loss",
        "tied": "tie",
        "first place": "tie",
        "half": "tie",
        "half lost": "tie",
        "unreadable": "unreadable",
    }
    assert both_orders(JUDGMENTS[:1], "fluency") == {"won": "unreadable"}  # the other order is not there yet


def test_counts_rates_and_position_bias():
    row = verdicts(JUDGMENTS, ["fluency"])["dimensions"]["fluency"]
    assert (row["n"], row["unreadable"]) == (7, 1)
    assert [row[name]["count"] for name in ("win", "tie", "loss")] == [2, 4, 1]
    assert row["win_rate"] == pytest.approx(4 / 7)
    assert row["ci95"][0] < row["win_rate"] < row["ci95"][1]
    assert row["orders"] == {
        "model_first": {"model": 4, "baseline": 1, "tie": 2},
        "baseline_first": {"model": 2, "baseline": 3, "tie": 2},
    }
    assert row["first"] == pytest.approx((4 + 3) / 10)
    assert row["consistent"] == pytest.approx(4 / 7)


def test_agreement_counts_wins_and_losses_with_unequal_scores():
    margins = {"won": 1.0, "won too": -1.0, "lost": -0.5, "tied": 9.0, "first place": 9.0, "half": 9.0}
    found = agreement(JUDGMENTS, margins, ["fluency"])["fluency"]
    assert (found["share"], found["n"], found["equal_scores"]) == (pytest.approx(2 / 3), 3, 0)
    assert found["ci95"] == pytest.approx([0.2077, 0.9385], abs=1e-4)  # Wilson, 2 of 3
    found = agreement(JUDGMENTS, margins | {"lost": 0.0}, ["fluency"])["fluency"]
    assert (found["n"], found["equal_scores"]) == (2, 1)


def test_nothing_readable_is_an_error_that_says_what_the_judge_said():
    rows = [{"id": "a", "order": order, "verdicts": {"fluency": None}, "reply": "I cannot."} for order in (0, 1)]
    with pytest.raises(ValueError, match="I cannot"):
        verdicts(rows, ["fluency"])
    with pytest.raises(ValueError, match="400 too long"):
        verdicts([row | {"error": "400 too long"} for row in rows], ["fluency"])


def test_a_dimension_without_readable_verdicts_has_no_rates():
    rows = [row | {"verdicts": row["verdicts"] | {"relevance": None}} for row in JUDGMENTS]
    results = {"judge": "j"} | verdicts(rows, ["fluency", "relevance"])
    assert results["dimensions"]["relevance"]["win_rate"] is None
    assert verdict_table(results).row_count == 2
