import pytest

from reward_models.report_runs import RunFiles
from reward_models.report_tables import benchmark, judge, localisation


def figures(value, low, high, n=10):
    return {"value": value, "ci95": [low, high], "n": n}


def test_localisation_stands_beside_its_baselines_and_in_no_benchmark_table():
    methods = {
        "segments": {"auc": figures(0.61, 0.55, 0.67), "lowest_unit": figures(0.5, 0.4, 0.6)},
        "surprisal": {
            "auc": figures(0.52, 0.5, 0.55) | {"ours_minus_this": figures(0.09, -0.01, 0.19)},
            "lowest_unit": figures(None, None, None),
        },
    }
    kinds = {"all": {"accuracy": 0.61, "n": 10, "ties": 0, "ci95": [0.55, 0.67]}}
    kinds["Irrelevant"] = {"accuracy": 0.7, "n": 4, "ties": 0, "ci95": [0.6, 0.8]}
    results = {"methods": methods, "subsets": kinds, "chance": {"lowest_unit": figures(0.36, 0.3, 0.4)}}
    run = RunFiles("loc", results=results)
    assert benchmark(run) is None
    view = localisation(run)
    assert view is not None
    ours, theirs = view["lines"]
    assert (ours["value"], ours["interval"], ours["difference"], ours["lowest"]) == (
        "0.61",
        "0.55 – 0.67",
        "",
        "50.0 %",
    )
    assert (theirs["difference"], theirs["lowest"]) == ("+0.09 (−0.01 to +0.19)", "–")
    assert ours["bar"] == {"value": "68.3", "low": "58.3", "width": "20.0", "baseline": None}
    assert [(line["name"], line["n"]) for line in view["kinds"]] == [("Irrelevant errors", 4)]
    assert view["chance"] == "36.0 %" and view["scale"] == pytest.approx((0.2, 0.8))


def test_a_judges_outcomes_keep_their_counts_shares_and_intervals():
    part = {"count": 6, "share": 0.6, "ci95": [0.3, 0.9]}
    row = {"n": 10, "unreadable": 1, "win": part, "tie": {"count": 0, "share": 0.0, "ci95": [0.0, 0.0]}}
    row |= {"loss": {"count": 4, "share": 0.4, "ci95": [0.1, 0.7]}, "win_rate": 0.6, "ci95": [0.3, 0.9]}
    row |= {"first": 0.55, "consistent": 0.8}
    held = {
        "judge": "j",
        "pairs": 11,
        "dimensions": {"helpfulness": row},
        "agreement": {"helpfulness": {"share": 0.7, "n": 10}},
    }
    view = judge(RunFiles("judged", judge=held))
    assert view is not None
    (line,) = view["lines"]
    assert line["parts"] == [
        ("win", 6, "60.0", "60 % (30 – 90)"),
        ("tie", 0, "0.0", "0 % (0 – 0)"),
        ("loss", 4, "40.0", "40 % (10 – 70)"),
    ]
    assert (line["value"], line["first"], line["consistent"], line["agrees"]) == (
        "0.60",
        "55.0 %",
        "80.0 %",
        "70.0 % of 10",
    )
    assert judge(RunFiles("empty", judge={"dimensions": {}})) is None
