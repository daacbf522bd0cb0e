import re

from reward_models.charts import LINES
from reward_models.report_policy import arms, policy_curves
from reward_models.report_runs import RunFiles


def run(name, scores, **config):
    """A PPO run of these scores by step."""
    metrics = [
        {"step": i, "reward/score": score, "kl/k1": 0.1 * i, "time/update": 2.0} for i, score in enumerate(scores)
    ]
    held = {"action_rule": "token", "n": None, "output_dir": f"runs/{name}", "gamma": 1.0} | config
    return RunFiles(name, run={"config": held}, policy=metrics)


def test_seeds_of_one_method_are_an_arm_named_by_what_sets_it_apart():
    runs = [run("a0", [0.0], seed=0), run("b0", [0.0], seed=0, action_rule="ngram", n=5), run("a1", [0.0], seed=1)]
    found = arms([*runs, RunFiles("foreign", policy=[{"step": 0, "reward/score": 1.0}])])
    assert [(arm.name, [one.name for one in arm.runs]) for arm in found] == [
        ("action_rule token, 2 seeds", ["a0", "a1"]),
        ("action_rule ngram", ["b0"]),
        ("foreign", ["foreign"]),
    ]
    assert [arm.name for arm in arms(runs)] == ["action_rule token, 2 seeds", "action_rule ngram"]
    third = run("c0", [0.0], action_rule="ngram", n=3)
    assert [arm.name for arm in arms([*runs, third])][1:] == ["action_rule ngram, n 5", "action_rule ngram, n 3"]


def test_the_line_is_the_mean_of_the_seeds_and_the_band_runs_from_lowest_to_highest():
    (view,) = policy_curves(
        [run("a", [0.0, 1.0, 5.0], seed=0), run("b", [2.0, 5.0], seed=1), run("c", [1.0, 3.0], seed=2)]
    )
    svg = next(chart["svg"] for chart in view["charts"] if chart["title"] == "Score of sampled answers")
    assert re.findall(r"step (\d): (\d)<", svg) == [("0", "1"), ("1", "3")]  # ends where the shortest run ends
    band = re.search(r'polygon class="band s0" points="([^"]*)"', svg).group(1)
    heights = [float(point.split(",")[1]) for point in band.split()]
    high0, high1, low1, low0 = heights
    line = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    assert high0 < line[0] < low0 and high1 < line[1] < low1
    per_unit = (line[0] - line[1]) / 2
    assert abs((low1 - high1) / per_unit - 4) < 0.1 and abs((low0 - high0) / per_unit - 2) < 0.1
    (arm,) = view["arms"]
    assert arm["first"] == "1 (0 to 2)" and arm["last"] == "4.33 (3 to 5)" and arm["seconds"] == "2"
    assert view["bands"]


def test_one_run_has_neither_band_nor_table():
    (view,) = policy_curves([run("a", [0.0, 1.0])])
    assert view["arms"] == [] and not view["bands"] and "band" not in view["charts"][0]["svg"]
    assert view["charts"][0]["note"] == "last 1"


def test_an_arm_keeps_its_line_style_where_another_lacks_the_metric():
    first, second = run("a", [0.0, 1.0]), run("b", [0.0, 2.0], gamma=0.9)
    for row in second.policy:
        row["value/explained_variance"] = 0.5
    (view,) = policy_curves([first, second])
    svg = next(chart["svg"] for chart in view["charts"] if chart["title"] == "Explained variance of values")
    assert "line s1" in svg and "line s0" not in svg


def test_more_arms_than_lines_can_be_told_apart_go_on_further_charts():
    views = policy_curves([run(str(i), [0.0, 1.0], gamma=i / 10) for i in range(LINES + 1)])
    assert [len(view["arms"]) for view in views] == [LINES, 1]
