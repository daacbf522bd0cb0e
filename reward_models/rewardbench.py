"""Benchmark a reward model on files of pairs (`segrew rewardbench`)."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from reward_models.card import CARD_FILE
from reward_models.model_card import keep_benchmark
from reward_models.pairs import ScoredPair, score_pairs
from reward_models.rewardbench_sections import length_baseline, rewardbench_scores
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.config import arg, parse, to_dict
from segrew.data_options import DataOptions
from segrew.language_models import TOKENS_PER_BATCH
from segrew.metrics import wilson_interval
from segrew.preferences import PreferencePair, load_preferences
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.sources import DataRecord, write_records


@dataclass
class BenchmarkConfig:
    """Which reward model on which rows."""

    reward_model: str = arg("runs/reward_model", help="Reward-model directory.")
    dataset_name: str = arg("allenai/reward-bench", help="File or hub set in RewardBench v1's record format.")
    dataset_split: str = arg("filtered", help="Split of a hub set.")
    benchmark: Literal["rewardbench", "pairs"] = arg(
        "rewardbench", help="rewardbench: section weights by subset; pairs: one accuracy over any preference file."
    )
    max_per_subset: int | None = arg(None, help="Score only the first rows of each subset, for a quick look.")
    subset_label: str = arg("", help="Written behind each subset's name in the table, such as 'rebuilt'.")
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")
    output_dir: str = arg("runs/rewardbench", help="Where results.json and scores.jsonl go.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")


def _score_row(scored: ScoredPair) -> dict[str, Any]:
    pair = scored.pair
    return {
        "id": pair.id,
        "subset": pair.subset,
        "score_chosen": scored.chosen.score,
        "score_rejected": scored.rejected.score,
        "units_chosen": len(scored.chosen.segments),
        "units_rejected": len(scored.rejected.segments),
    }


def benchmark_results(scored: list[ScoredPair], benchmark: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's results and the length baseline's, in one shape.

    With "pairs" there are no sections: `overall` is the accuracy over all rows.
    """
    rows, texts = [_score_row(pair) for pair in scored], [vars(pair.pair) for pair in scored]
    if benchmark == "rewardbench":
        return rewardbench_scores(rows), length_baseline(texts)
    results = []
    for score, table in ((rewardbench_scores, rows), (length_baseline, texts)):
        named = score([row | {"subset": row["subset"] or "pairs"} for row in table])
        pooled = score([row | {"subset": "all"} for row in table])["subsets"]["all"]
        subsets = named["subsets"] if len(named["subsets"]) > 1 else {}
        results.append({"subsets": {**subsets, "all": pooled}, "sections": {}, "overall": pooled["accuracy"],
                        "ties": named["ties"], "missing": []})  # fmt: skip
    return results[0], results[1]


def _first_of_each_subset(pairs: list[PreferencePair], limit: int | None) -> list[PreferencePair]:
    seen: Counter = Counter()
    kept = []
    for pair in pairs:
        if limit is None or seen[pair.subset] < limit:
            kept.append(pair)
        seen[pair.subset] += 1
    return kept


def run_benchmark(
    config: BenchmarkConfig, console: Console | None = None, options: DataOptions | None = None
) -> dict[str, Any]:
    """Score every row, write `results.json` and `scores.jsonl`, print the table.

    Raises:
        ValueError: the reward model or the rows cannot be used.
    """
    console = console or Console()
    loaded = load_preferences(config.dataset_name, config.dataset_split, options, keep_identical=True)
    pairs = loaded.pairs
    if config.benchmark == "rewardbench" and not all(pair.subset for pair in pairs):
        raise ValueError(
            f"{config.dataset_name}: rows without a 'subset' are not in RewardBench's format; use --benchmark pairs."
        )
    pairs = _first_of_each_subset(pairs, config.max_per_subset)
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    run = RunDirectory.create(
        config.output_dir,
        command="rewardbench",
        config=to_dict(config, options or DataOptions()),
        overwrite=config.overwrite_output_dir,
    )
    scored = score_pairs(
        reward_model, pairs, max_tokens=config.max_tokens_per_batch, description="Scoring the benchmark"
    )
    fitted = Counter(f"pairs with {part} cut to fit" for pair in scored for part in sorted(pair.cut))
    record = DataRecord("benchmark", "pairs", len(scored), loaded.sources, fitted)
    console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(run.path, [record])
    return write_results(run, scored, config, reward_model, console)


def write_results(
    run: RunDirectory,
    scored: list[ScoredPair],
    config: BenchmarkConfig,
    reward_model: SegmentRewardModel,
    console: Console,
) -> dict[str, Any]:
    """Write and print the results of scored pairs; those of a whole benchmark also go with the reward model."""
    results, baseline = benchmark_results(scored, config.benchmark)
    settings = {
        "reward_model": config.reward_model,
        "rule": reward_model.segmentation.label,
        "aggregator": reward_model.card.aggregator,
        "read_position": reward_model.read_position,
        "max_length": reward_model.card.max_length,
        "dtype": str(next(reward_model.model.parameters()).dtype).removeprefix("torch."),
        "max_tokens_per_batch": config.max_tokens_per_batch,
        "dataset": config.dataset_name,
        "max_per_subset": config.max_per_subset,
        "subset_label": config.subset_label,
    }
    record = {"benchmark": config.benchmark, **results, "length_baseline": baseline, "settings": settings}
    run.write_json("results.json", record)
    write_jsonl(run.path / "scores.jsonl", [_score_row(pair) for pair in scored])
    if config.max_per_subset is None and (Path(config.reward_model) / CARD_FILE).is_file():
        keep_benchmark(Path(config.reward_model), record)
    console.print(results_table(record))
    if results["missing"]:
        console.print(f"Missing: {', '.join(map(str, results['missing']))} (left out of the means)")
    console.print(f"Results written to {run.path / 'results.json'}")
    return record


def results_table(record: dict[str, Any]) -> Table:
    """Return sections and subsets with accuracy, n, interval and ties, the length baseline beside."""
    baseline, label = record["length_baseline"], record["settings"]["subset_label"]
    table = Table("", "n", "accuracy", "95 % interval", "ties", "longer wins", title=record["benchmark"])
    for name, entry in record["subsets"].items():
        low, high = entry["ci95"]
        shown = f"{name} ({label})" if label else name
        longer = baseline["subsets"][name]["accuracy"]
        table.add_row(
            shown,
            str(entry["n"]),
            f"{entry['accuracy']:.3f}",
            f"{low:.3f} - {high:.3f}",
            str(entry["ties"]),
            f"{longer:.3f}",
        )
    table.add_section()
    for name, entry in record["sections"].items():
        longer = baseline["sections"][name]["accuracy"]
        table.add_row(name, str(entry["n"]), f"{entry['accuracy']:.3f}", "", "", f"{longer:.3f}")
    if record["sections"]:
        table.add_row("overall", "", f"{record['overall']:.3f}", "", "", f"{baseline['overall']:.3f}")
    return table


def pair_accuracy(scored: list[ScoredPair]) -> dict[str, Any]:
    """Accuracy over all pairs with its Wilson interval; a tie is no win."""
    wins = sum(pair.chosen.score > pair.rejected.score for pair in scored)
    low, high = wilson_interval(wins, len(scored))
    return {"accuracy": wins / len(scored), "ci95": [low, high], "n": len(scored)}


def main(argv: list[str]) -> None:
    """Run `segrew rewardbench`."""
    config, options = parse("rewardbench", (BenchmarkConfig, DataOptions), argv)
    run_benchmark(config, options=options)
