"""The table of benchmarks: where each one's rows are, how they are read, measured and scored."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from reward_models.benchmark_credit import Row, row_credits
from reward_models.benchmark_items import Item, score_items
from reward_models.benchmark_readers import (
    ReadRow,
    judgebench_item,
    list_item,
    marked_item,
    pair_item,
    rewardbench_item,
)
from reward_models.list_benchmarks import (
    judgebench_scores,
    pairs_scores,
    rewardbench2_credits,
    rewardbench2_scores,
    rmbench_scores,
)
from reward_models.localise import bandit_for, localisation_credits, localisation_scores, localise_items
from reward_models.rewardbench_sections import rewardbench_scores
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.preferences import EMBEDDED_PAIRS

Name = Literal["rewardbench", "rewardbench2", "rm-bench", "judgebench", "localisation", "pairs"]
Measure = Callable[[Sequence[Item], int], list[dict[str, Any]]]


def measure_scores(reward_model: SegmentRewardModel, _: str | None) -> Measure:
    """Measure the score of every answer."""
    return lambda items, max_tokens: [s.row() for s in score_items(reward_model, items, max_tokens=max_tokens)]


def measure_tokens(reward_model: SegmentRewardModel, bandit_model: str | None) -> Measure:
    """Measure the reward of every token, by this model and by the baselines."""
    bandit = bandit_for(reward_model, bandit_model)
    return lambda items, max_tokens: localise_items(reward_model, bandit, items, max_tokens=max_tokens)


class Benchmark(NamedTuple):
    """What is particular to one benchmark.

    Args:
        dataset, split: where its rows are unless told otherwise.
        read: a row and its place to an item. measure: items to lines of `scores.jsonl`, for a model and --bandit_model.
        score: lines to results. credit: lines to what each row is worth, for paired tests.
        compares: whether it compares answers, so that "the longer answer wins" is a baseline for it.
    """

    dataset: str
    split: str
    read: ReadRow
    score: Callable[[Sequence[Row]], dict[str, Any]]
    credit: Callable[[Sequence[Row]], Mapping[tuple[str, str, str], float]] = row_credits
    measure: Callable[[SegmentRewardModel, str | None], Measure] = measure_scores
    compares: bool = True


BENCHMARKS: dict[Name, Benchmark] = {
    "rewardbench": Benchmark("allenai/reward-bench", "filtered", rewardbench_item, rewardbench_scores),
    "rewardbench2": Benchmark(
        "allenai/reward-bench-2",
        "test",
        partial(list_item, subset="subset"),
        rewardbench2_scores,
        rewardbench2_credits,
    ),
    "rm-bench": Benchmark("THU-KEG/RM-Bench", "train", partial(list_item, subset="domain"), rmbench_scores),
    "judgebench": Benchmark("ScalerLab/JudgeBench", "gpt+claude", judgebench_item, judgebench_scores),
    "localisation": Benchmark(
        EMBEDDED_PAIRS, "test", marked_item, localisation_scores, localisation_credits, measure_tokens, False
    ),
    "pairs": Benchmark(EMBEDDED_PAIRS, "test", pair_item, pairs_scores),
}
