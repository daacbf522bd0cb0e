"""The whole pipeline on the embedded model and data, ending in a page to look at (`segrew demo`)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from policy.ppo import PPOConfig, train_policy
from reward_models.benchmark_items import ScoredItem, item_of_pair, score_items
from reward_models.calibrate import CalibrationConfig, calibrate
from reward_models.localisation import localisation
from reward_models.report import build_report
from reward_models.rewardbench import SCORES_FILE, BenchmarkConfig, open_benchmark, write_results
from reward_models.score import answers_of_pairs, score_record
from reward_models.segment_reward_model import SegmentRewardModel
from reward_models.train import train_reward_model
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments
from segrew.config import arg, parse, to_dict
from segrew.embedded_model import EMBEDDED_MODEL, resolve_model
from segrew.metrics import mean_interval
from segrew.preferences import PreferencePair, everyday_pairs
from segrew.run_directory import RunDirectory, read_jsonl, write_jsonl
from segrew.tiny_model import make_tiny_model


@dataclass
class DemoConfig:
    """How large a demonstration."""

    scale: Literal["small", "tiny"] = arg(
        "small", help="small: SmolLM2-135M; tiny: half a million random-made weights."
    )
    output_dir: str = arg("runs/demo", help="Where every stage writes, and report.html.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")
    seed: int = arg(0, help="Of everything random.")


@dataclass
class Stages:
    """Names and durations of what has run."""

    console: Console
    total: int
    seconds: dict[str, float]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce and time one stage."""
        self.console.rule(f"[bold]{len(self.seconds) + 1}/{self.total} {name}", align="left")
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _policy_settings(scale: str) -> dict[str, Any]:
    """Settings of the PPO stage: segments are what is rewarded and what acts."""
    shared: dict[str, Any] = {"action_rule": "entropy", "eval_dataset": "everyday", "use_peft": True, "save_steps": 0}
    if scale == "tiny":
        sizes = {"total_steps": 4, "rollout_batch_size": 16, "max_new_tokens": 24, "eval_samples": 32}
    else:
        sizes = {"total_steps": 5, "rollout_batch_size": 16, "max_new_tokens": 40, "eval_samples": 40}
    rates = {"learning_rate": 3e-4, "critic_learning_rate": 3e-4, "num_mini_batches": 2}
    return shared | sizes | rates | {"eval_steps": sizes["total_steps"]}


def run_demo(config: DemoConfig, console: Console) -> Path:
    """Run every stage and return the path of the report."""
    run = RunDirectory.create(
        config.output_dir, command="demo", config=to_dict(config), overwrite=config.overwrite_output_dir
    )
    stages = Stages(console, 6, {})
    reward_dir = str(run.path / "reward_model")
    with stages.stage("Model and data"):
        model = _model(config, run.path, console)
        test = everyday_pairs("test")
        console.print(f"Model {model}; {len(everyday_pairs('train'))} pairs to train on, {len(test)} to evaluate on")
    with stages.stage("Segment reward model"):
        _train(model, reward_dir, config.seed, console)
    with stages.stage("Location normalizer"):
        calibrate(CalibrationConfig(reward_model=reward_dir), console)
    with stages.stage("Benchmark"):
        reward_model = SegmentRewardModel.from_pretrained(reward_dir)
        items = [item_of_pair(pair) for pair in test]
        scored = score_items(reward_model, items, description="Scoring held-out pairs")
        results = _benchmark(run.path, reward_dir, reward_model, scored, console)
    with stages.stage("Dense-reward PPO"):
        del reward_model
        settings: dict[str, Any] = {"model_name_or_path": model, "reward_model_path": reward_dir, "seed": config.seed}
        policy_dir = run.path / "policy"
        train_policy(PPOConfig(**settings, output_dir=str(policy_dir), **_policy_settings(config.scale)))
    headline = _headline(results, scored, test, policy_dir)
    with stages.stage("Report"):
        _summarise(run, headline, stages, model, config.scale)
        report = build_report([run.path], run.path / "report.html")
    _summarise(run, headline, stages, model, config.scale)
    console.print(_table(headline, stages))
    console.print(f"Look at {report}")
    return report


def _model(config: DemoConfig, directory: Path, console: Console) -> str:
    if config.scale == "small":
        resolve_model(EMBEDDED_MODEL)
        return EMBEDDED_MODEL
    console.print("Making a model of half a million parameters and teaching it a little English …")
    return str(make_tiny_model(directory / "model", steps=60, seed=config.seed))


def _train(model: str, output_dir: str, seed: int, console: Console) -> None:
    # A head on a frozen trunk reads a stop token unlike any other token, so the last unit is read before it.
    settings = RewardModelConfig(
        model_name_or_path=model, tune="head", target_length=4.0, read_position="content", max_length=512
    )
    arguments = RewardTrainingArguments(output_dir=output_dir, seed=seed)
    train_reward_model(settings, arguments, console)


def _benchmark(
    path: Path, reward_dir: str, reward_model: SegmentRewardModel, scored: list[ScoredItem], console: Console
) -> dict[str, Any]:
    settings = BenchmarkConfig(reward_model=reward_dir, benchmark="pairs", output_dir=str(path / "benchmark"))
    items, rows = [one.item for one in scored], [one.row() for one in scored]
    run, _ = open_benchmark(settings, items, reward_model)
    write_jsonl(run.path / SCORES_FILE, rows)
    results = write_results(run, items, rows, settings, reward_model, console)
    answers = answers_of_pairs(everyday_pairs("test"))
    sides = [side for one in scored for side in one.answers]
    write_jsonl(path / "scores.jsonl", [score_record(a, r) for a, r in zip(answers, sides, strict=True)])
    return results


def _headline(
    results: dict[str, Any], scored: list[ScoredItem], pairs: list[PreferencePair], policy_dir: Path
) -> list[dict[str, Any]]:
    """The three figures that the demo is about, each with its interval and what to compare it with."""
    accuracy, longer = results["subsets"]["all"], results["length_baseline"]["overall"]
    landed = localisation([(one.answers[1].segments, pair.faults) for one, pair in zip(scored, pairs, strict=True)])
    evaluations = read_jsonl(policy_dir / "evaluation.jsonl")
    before, after = evaluations[0]["scores"], evaluations[-1]["scores"]
    gain, low, high = mean_interval([b - a for a, b in zip(before, after, strict=True)])
    mean_before, mean_after = sum(before) / len(before), sum(after) / len(after)
    return [
        {
            "label": "Pair accuracy on held-out prompts",
            "value": accuracy["accuracy"],
            "reference": longer,
            "low": accuracy["ci95"][0],
            "high": accuracy["ci95"][1],
            "note": f'"the longer answer wins": {longer:.3f}; n {accuracy["n"]}',
        },
        {
            "label": "Faulty spans in the lowest third of their response",
            "value": landed.share,
            "reference": landed.chance,
            "low": landed.ci95[0],
            "high": landed.ci95[1],
            "note": f"chance: {landed.chance:.3f}; n {landed.n}",
        },
        {
            "label": "Policy's gain in mean score by PPO",
            "value": gain,
            "low": low,
            "high": high,
            "note": f"{mean_before:+.3f} before, {mean_after:+.3f} after; {len(before)} held-out prompts, paired",
        },
    ]


def _summarise(run: RunDirectory, headline: list[dict], stages: Stages, model: str, scale: str) -> None:
    timed = [{"name": name, "seconds": round(seconds, 1)} for name, seconds in stages.seconds.items()]
    run.write_json("summary.json", {"headline": headline, "stages": timed, "model": model, "scale": scale})


def _table(headline: list[dict[str, Any]], stages: Stages) -> Table:
    table = Table("", "", "95 % interval", "", title="What came of it")
    for row in headline:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        table.add_row(row["label"], f"{row['value']:.3f}", interval, row["note"])
    table.add_section()
    for name, seconds in stages.seconds.items():
        table.add_row(f"{len(table.rows) - len(headline) + 1}. {name}", f"{seconds:.0f} s", "", "")
    table.add_row("all", f"{sum(stages.seconds.values()):.0f} s", "", "")
    return table


def main(argv: list[str]) -> None:
    """Run `segrew demo`."""
    (config,) = parse("demo", (DemoConfig,), argv)
    run_demo(config, Console())
