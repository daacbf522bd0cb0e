import re

from reward_models.report_curves import BINS, DOTS, length_bias_chart, unit_lengths
from reward_models.report_runs import RunFiles


def answers(lengths, scores=None):
    scores = scores or [0.0] * len(lengths)
    return [
        {"prompt": str(i), "response": "x", "score": score, "segments": [{"text": "x", "tokens": n} for n in units]}
        for i, (units, score) in enumerate(zip(lengths, scores, strict=True))
    ]


def test_bars_count_units_by_length_and_the_last_takes_the_longer_ones():
    units = [1] * 50 + [2] * 30 + [3] * 20
    found = unit_lengths(RunFiles("r", answers=answers([units, [200]])))
    assert found is not None
    bars = re.findall(r"<title>(\d+)(?: to \d+)?: (\d+) \(", found["svg"])
    assert bars[:3] == [("1", "50"), ("2", "30"), ("3", "20")] and bars[-1] == (str(BINS), "1")
    assert (
        "mean 3.66, median 2, 90 % at most 3, longest 200; 101 units. The last bar also holds 1 longer" in found["says"]
    )
    assert unit_lengths(RunFiles("r", answers=answers([[]]))) is None


def test_score_against_length_draws_the_line_through_all_answers_and_thins_the_points():
    lengths = [[10 + i] for i in range(1000)]
    found = length_bias_chart(RunFiles("r", answers=answers(lengths, [0.02 * n for (n,) in lengths])))
    assert found is not None
    assert "slope +2.000 per 100 tokens over 1000 answers" in found["says"]
    drawn = found["svg"].count("<circle")
    assert drawn <= DOTS and f"{drawn} of 1000 are drawn" in found["says"]
    assert found["svg"].count("polyline") == 1
