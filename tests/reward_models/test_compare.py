"""Paired tests on hand-made credits."""

import json

import pytest

from reward_models.benchmark_tables import comparison_table
from reward_models.compare import compare_credits, load_scored_rows
from segrew.metrics import bootstrap_interval, sign_test


def test_mcnemars_exact_p_is_the_binomial_tail():
    assert sign_test(1, 6) == pytest.approx(2 * (1 + 7) / 2**7)
    assert sign_test(0, 0) == 1.0 and sign_test(3, 3) == 1.0
    assert 0 < sign_test(400, 900) < 1e-30


def test_bootstrap_interval_is_near_the_normal_one_and_repeatable():
    values = [float(k % 2) for k in range(400)]
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.008)
    assert bootstrap_interval(values) == (low, high) and bootstrap_interval([2.0]) == (2.0, 2.0)


def credits(values, subset="a"):
    return {(subset, str(i), "d"): float(value) for i, value in enumerate(values)}


def test_only_rows_of_both_are_compared():
    ours = credits([1, 1, 1, 0, 1, 0]) | credits([1, 1], "b")
    theirs = credits([1, 0, 0, 1, 0]) | {("b", "0", "d"): 0.0, ("b", "1", "other text"): 0.0}
    found = compare_credits(ours, theirs)
    # a: 0 +1 +1 -1 +1; b: +1
    assert found["subsets"]["a"] | {"ci95": None} == {
        "n": 5, "difference": 0.4, "ci95": None, "better": 3, "worse": 1, "p": pytest.approx(2 * 5 / 16),
    }  # fmt: skip
    assert found["all"]["difference"] == pytest.approx(0.5) and found["all"]["better"] == 4
    assert (found["only_ours"], found["only_theirs"]) == (2, 1)
    with pytest.raises(ValueError, match="share no row"):
        compare_credits(ours, credits([1.0], "c"))


def test_a_model_against_itself_differs_nowhere():
    found = compare_credits(credits([1, 0, 1]), credits([1, 0, 1]))
    assert found["all"]["difference"] == 0 and found["all"]["p"] == 1.0 and found["subsets"] == {}


def test_what_is_no_finished_run_of_the_benchmark_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        load_scored_rows(str(tmp_path), "pairs")
    (tmp_path / "results.json").write_text(json.dumps({"benchmark": "rm-bench"}))
    (tmp_path / "scores.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="results of --benchmark rm-bench, not of pairs"):
        load_scored_rows(str(tmp_path / "results.json"), "pairs")
    assert load_scored_rows(str(tmp_path / "results.json"), "rm-bench") == [{"id": 1}]


def test_one_row_has_no_interval():
    found = compare_credits(credits([1]), credits([0]))["all"]
    assert found["difference"] == 1.0 and found["ci95"] is None
    table = comparison_table({"to": "x", "all": found, "subsets": {}, "only_ours": 0, "only_theirs": 0})
    assert [list(column.cells) for column in table.columns][3] == ["n/a"]
