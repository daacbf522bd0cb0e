"""Gains by the earlier score are those of hand-made scores, and regression to the mean is not one of them."""

import json
import random

import pytest

from policy.best_of import Candidates
from policy.compare_scores import compare, comparison_table, scores_before, write_comparison
from reward_models.scored_responses import ScoredResponse


def prompt(i):
    return [{"role": "user", "content": f"question {i}"}]


def test_gains_of_each_quarter_and_of_all():
    before = {f"{i}": [float(i)] for i in range(8)}
    gains = [4.0, 2.0, 0.0, 0.0, 1.0, 1.0, -3.0, -1.0]
    after = {f"{i}": [i + gain + 0.5, i + gain - 0.5] for i, gain in enumerate(gains)}
    record = compare(before | {"x": [0.0]}, after | {"y": [0.0], "z": [0.0]})
    found = {row["group"]: (row["prompts"], row["gain"], row["before"]) for row in record["groups"]}
    assert found == {
        "worst quarter": (2, 3.0, 0.5),
        "second quarter": (2, 0.0, 2.5),
        "third quarter": (2, 1.0, 4.5),
        "best quarter": (2, -2.0, 6.5),
        "all": (8, 0.5, 3.5),
    }
    assert (record["prompts"], record["only_before"], record["only_after"]) == (8, 1, 2)
    assert record["joint"][0] == [0.0, 4.0]
    low, high = record["groups"][0]["ci95"]
    assert (low, high) == (2.0, 4.0)
    assert "regress to the mean" in str(comparison_table(record).title)


def test_a_second_draw_of_the_same_policy_gains_nothing_where_the_ranking_is_apart():
    """With one noisy score a prompt the worst quarter seems to gain; ranked by other answers it does not."""
    draw = random.Random(0)
    quality = [draw.gauss(0, 1) for _ in range(400)]

    def scores(n):
        return {f"{i}": [q + draw.gauss(0, 1) for _ in range(n)] for i, q in enumerate(quality)}

    naive = compare(scores(1), scores(1))["groups"][0]
    assert naive["gain"] > 0.5 and naive["ci95"][0] > 0
    apart = compare(scores(2), scores(2))
    assert apart["ranked_by"].startswith("half")
    assert all(row["ci95"][0] < 0 < row["ci95"][1] for row in apart["groups"])
    assert "regress" not in str(comparison_table(apart).title)


def test_fewer_prompts_than_quarters_leave_some_out():
    record = compare({"a": [0.0], "b": [1.0]}, {"a": [1.0], "b": [1.0]})
    assert sum(row["prompts"] for row in record["groups"][:-1]) == 2


@pytest.fixture
def earlier(tmp_path):
    """The directory of an earlier run with scores of two prompts."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"reward_model": str(tmp_path / "rm")}}))
    rows = [{"prompt": prompt(i), "score": float(i + k)} for i in range(2) for k in range(2)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_an_earlier_runs_scores_are_read_by_prompt(earlier):
    for name in (earlier, earlier / "scores.jsonl"):
        scores = scores_before(str(name), str(earlier / "rm"), [prompt(0)])
        assert sorted(scores.values()) == [[0.0, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prompt": "x", "score": 1.0}], "no 'score' and 'prompt'"),
        ([{"prompt": prompt(0)}], "no 'score' and 'prompt'"),
        ([{"prompt": prompt(0), "score": 1.0, "side": "chosen"}], "side of a preference pair"),
        ([{"prompt": prompt(9), "score": 1.0}], "none of these prompts"),
    ],
)
def test_what_holds_no_scores_of_answers_is_refused(tmp_path, rows, message):
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        scores_before(str(path), "rm", [prompt(0)])


def test_scores_of_another_reward_model_do_not_compare(earlier):
    with pytest.raises(ValueError, match="do not compare"):
        scores_before(str(earlier), str(earlier / "other"), [prompt(0)])


def test_repeated_prompts_are_averaged_and_all_is_written(tmp_path, capsys):
    from rich.console import Console

    answers = [Candidates("q", prompt(0), 1.0, ["a"], [True], [ScoredResponse(score, [])]) for score in (1.0, 4.0)]
    key = json.dumps([["user", "question 0"]])
    write_comparison(tmp_path, {key: [2.0]}, answers, Console())
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert record["joint"] == [[2.0, 2.5]]
    assert (tmp_path / "comparison.svg").stat().st_size > 1000
    assert "Gain in score" in capsys.readouterr().out
