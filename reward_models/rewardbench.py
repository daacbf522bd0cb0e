"""Benchmark a reward model (`segrew rewardbench`): read, score chunk by chunk, resume, summarize."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from reward_models.benchmark_credit import Row
from reward_models.benchmark_items import Item, score_fields, with_text
from reward_models.benchmark_readers import read_items, read_prior_sets
from reward_models.benchmark_tables import print_results
from reward_models.benchmarks import BENCHMARKS, Name
from reward_models.card import CARD_FILE
from reward_models.compare import compare_credits, load_scored_rows
from reward_models.length_bias import length_bias
from reward_models.model_card import keep_benchmark
from reward_models.official_files import write_official_files
from reward_models.segment_reward_model import SegmentRewardModel
from segrew import processes
from segrew.config import arg, parse, to_dict
from segrew.conversations import TOKENS_PER_BATCH
from segrew.data_options import DataOptions
from segrew.language_models import model_fingerprint, plain_model
from segrew.run_directory import RunDirectory, read_json, read_jsonl, require_same_settings, write_jsonl
from segrew.sources import DataRecord, write_records

ANSWERS_PER_CHUNK = 256
SCORES_FILE, SETTINGS_FILE = "scores.jsonl", "settings.json"


@dataclass
class BenchmarkConfig:
    """Which reward model on which rows."""

    reward_model: str = arg("runs/reward_model", help="Reward-model directory.")
    benchmark: Name = arg(
        "rewardbench",
        help="rewardbench (v1: sections by its weights), rewardbench2, rm-bench, judgebench, localisation (rewards "
        "against marked error spans), or pairs: one accuracy over any preference file.",
    )
    dataset_name: str | None = arg(
        None, help="File or hub set in the benchmark's own record format; default its set on the hub, or 'everyday'."
    )
    dataset_split: str | None = arg(None, help="Split of it; default the benchmark's own.")
    prior_sets: str | None = arg(
        None, help="With rewardbench: file or hub set of its prior sets, such as allenai/pref-test-sets."
    )
    bandit_model: str | None = arg(
        None, help="With localisation: a reward model of rule response for the baselines; default the model itself."
    )
    compare_to: str | None = arg(
        None, help="Output directory (or results.json) of another model's run: paired tests on the rows of both."
    )
    max_per_subset: int | None = arg(None, help="Score only the first rows of each subset, for a quick look.")
    subset_label: str = arg("", help="Written behind each subset's name in the table, such as 'rebuilt'.")
    dtype: Literal["auto", "float32", "bfloat16"] = arg(
        "auto",
        help="Of the reward model's trunk and of the frozen model that cuts. auto: the trunk as its files hold it; the "
        "frozen model, which of --tune head is the trunk too, in bfloat16 where the processor computes in it. "
        "bfloat16 is faster there, and moves scores a little.",
    )
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")
    output_dir: str = arg("runs/rewardbench", help="Where results.json and scores.jsonl go; a stopped run goes on.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")

    def __post_init__(self) -> None:
        for name, owner in (("prior_sets", "rewardbench"), ("bandit_model", "localisation")):
            if getattr(self, name) and self.benchmark != owner:
                raise ValueError(f"--{name} belongs to --benchmark {owner}, not to {self.benchmark}; leave it out.")

    @property
    def source(self) -> tuple[str, str]:
        """Data set and split."""
        benchmark = BENCHMARKS[self.benchmark]
        return self.dataset_name or benchmark.dataset, self.dataset_split or benchmark.split


def run_benchmark(
    config: BenchmarkConfig, console: Console | None = None, options: DataOptions | None = None
) -> dict[str, Any]:
    """Score every row that is not scored yet, write `results.json` and `scores.jsonl`, print the table.

    Raises:
        ValueError: the reward model or the rows cannot be used, or the directory holds a run with other settings.
    """
    console, benchmark = console or Console(quiet=not processes.is_main()), BENCHMARKS[config.benchmark]
    items, sources = read_items(*config.source, benchmark.read, options)
    if config.prior_sets:
        prior, prior_sources = read_prior_sets(config.prior_sets, options)
        items, sources = items + prior, sources + prior_sources
    if config.benchmark == "localisation" and not any(item.spans for item in items):
        raise ValueError(
            f"{config.source[0]}: none of {len(items)} answers has a marked error (column 'spans', or 'faults' of a "
            "pair), so there is nothing to locate; --benchmark pairs takes pairs without marks."
        )
    others = load_scored_rows(config.compare_to, config.benchmark) if config.compare_to else None
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model, dtype=getattr(torch, config.dtype, None))
    items = [with_text(item, reward_model.chat) for item in _first_of_each_subset(items, config.max_per_subset)]
    run, rows = RunDirectory(config.output_dir), list[dict[str, Any]]()
    if processes.is_main():
        run, rows = open_benchmark(config, items, reward_model, options)
    rows = processes.from_main(rows)
    if rows:
        console.print(f"{len(rows)} of {len(items)} rows were scored before; going on from there.")
    if len(rows) < len(items):
        measure = benchmark.measure(reward_model, config.bandit_model)
        for chunk in track(_chunks(items[len(rows) :]), "Scoring the benchmark", console=console):
            found = processes.gather_list(measure(processes.share(chunk), config.max_tokens_per_batch))
            rows += found
            for row in found if processes.is_main() else ():
                run.append(SCORES_FILE, row)
    if not processes.is_main():
        return processes.from_main({})
    fitted = Counter(f"rows with {part} cut to fit" for row in rows for part in row["cut"])
    read = DataRecord("benchmark", "rows", len(rows), sources, fitted)
    console.print(str(read), highlight=False, markup=False, soft_wrap=True)
    write_records(run.path, [read])
    return processes.from_main(write_results(run, items, rows, config, reward_model, console, others))


def _first_of_each_subset(items: list[Item], limit: int | None) -> list[Item]:
    seen: Counter = Counter()
    kept = []
    for item in items:
        if limit is None or seen[item.subset] < limit:
            kept.append(item)
        seen[item.subset] += 1
    return kept


def _chunks(items: Sequence[Item]) -> list[list[Item]]:
    chunks: list[list[Item]] = [[]]
    held = 0
    for item in items:
        if held and held + len(item.answers) > ANSWERS_PER_CHUNK * processes.count():
            chunks.append([])
            held = 0
        chunks[-1].append(item)
        held += len(item.answers)
    return chunks


def scoring_settings(
    config: BenchmarkConfig, items: Sequence[Item], reward_model: SegmentRewardModel
) -> dict[str, Any]:
    """Return everything that a score depends on; the batch size is no part of it."""
    heads = hashlib.sha256()
    for name in ("score", "unit_attention"):
        head: Any = getattr(plain_model(reward_model.model), name, None)
        heads.update(b"" if head is None else head.weight.detach().float().cpu().numpy().tobytes())
    read = [(item.id, item.subset, item.correct, item.digest, item.spans, item.template) for item in items]
    texts = hashlib.sha256(repr(read).encode("utf-8", "surrogatepass"))
    normalizer = reward_model.normalizer
    numbers: dict[str, Any] = {}
    if normalizer and not BENCHMARKS[config.benchmark].compares:  # its scores are normalized rewards
        numbers = {"normalizer_parameters": list(normalizer.modes[normalizer.mode])}
    return {
        "reward_model": config.reward_model,
        "weights": f"{model_fingerprint(reward_model.model)}-{heads.hexdigest()[:8]}",
        "rule": reward_model.segmentation.label,
        "fingerprint": reward_model.fingerprint,
        "aggregator": reward_model.card.aggregator,
        "temperature": reward_model.card.temperature,
        "read_position": reward_model.read_position,
        "max_length": reward_model.card.max_length,
        "overlong": reward_model.card.overlong,
        "normalizer": normalizer.mode if normalizer else "none",
        "dtype": str(next(_trunk_of(reward_model).parameters()).dtype).removeprefix("torch."),
        "benchmark": config.benchmark,
        "dataset": config.source[0],
        "split": config.source[1],
        "prior_sets": config.prior_sets,
        "bandit_model": config.bandit_model,
        "bandit_weights": _files_digest(config.bandit_model),
        "max_per_subset": config.max_per_subset,
        "rows": f"{len(items)} ({texts.hexdigest()[:8]})",
    } | numbers


def _trunk_of(reward_model: SegmentRewardModel) -> nn.Module:
    """Return the model whose states are read: the segmenter where it is the trunk and runs anyway."""
    of_segmenter = reward_model.card.trunk_is_segmenter and reward_model.segmentation.needs_model
    return reward_model.segmenter() if of_segmenter else reward_model.model


def _files_digest(directory: str | None) -> str | None:
    """Hash of a local model's weights and card; None without one."""
    if directory is None:
        return None
    files = sorted([*Path(directory).glob("*.safetensors"), *Path(directory).glob(CARD_FILE)])
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:8]


def open_benchmark(
    config: BenchmarkConfig,
    items: Sequence[Item],
    reward_model: SegmentRewardModel,
    options: DataOptions | None = None,
) -> tuple[RunDirectory, list[dict[str, Any]]]:
    """Claim the output directory, or go on in it with the rows scored there under the same settings.

    Raises:
        ValueError: it holds another run, or one with other settings.
    """
    settings, directory = scoring_settings(config, items, reward_model), Path(config.output_dir)
    resume = (directory / SETTINGS_FILE).is_file() and not config.overwrite_output_dir
    if resume:
        hashed = ("reward_model", "dataset", "split")  # hashes say more
        matter = {name: value for name, value in settings.items() if name not in hashed}
        require_same_settings(read_json(directory / SETTINGS_FILE), matter, directory)
    run = RunDirectory.create(
        directory,
        command="rewardbench",
        config=to_dict(config, options or DataOptions()),
        overwrite=config.overwrite_output_dir,
        resume=resume or None,
    )
    run.write_json(SETTINGS_FILE, settings)
    rows = read_jsonl(directory / SCORES_FILE) if (directory / SCORES_FILE).is_file() else []
    write_jsonl(directory / SCORES_FILE, rows)  # without a last line that a kill left unfinished
    return run, rows


def write_results(
    run: RunDirectory,
    items: Sequence[Item],
    rows: Sequence[Row],
    config: BenchmarkConfig,
    reward_model: SegmentRewardModel,
    console: Console,
    others: Sequence[Row] | None = None,
) -> dict[str, Any]:
    """Write and print what scored rows come to; accuracies of a whole benchmark also go with the reward model.

    Args:
        others: the same benchmark's rows of another model, to compare with.
    """
    benchmark = BENCHMARKS[config.benchmark]
    record = {"benchmark": config.benchmark, **benchmark.score(rows)}
    record["truncated"] = sum(bool(row["cut"]) for row in rows)
    if benchmark.compares:
        record["length_baseline"] = length_baseline(items, benchmark.score)
        record["length_bias"] = _length_bias(items, rows)
    if others is not None:
        record["comparison"] = {"to": config.compare_to}
        record["comparison"] |= compare_credits(benchmark.credit(rows), benchmark.credit(others))
    record["settings"] = read_json(run.path / SETTINGS_FILE) | {
        "max_tokens_per_batch": config.max_tokens_per_batch,
        "subset_label": config.subset_label,
        "device": str(next(reward_model.model.parameters()).device),
    }
    run.write_json("results.json", record)
    if benchmark.compares and config.max_per_subset is None and (Path(config.reward_model) / CARD_FILE).is_file():
        keep_benchmark(Path(config.reward_model), record)
    if config.benchmark == "rewardbench":
        write_official_files(run.path, f"segrew/{Path(config.reward_model).name}", items, rows, reward_model.chat)
    print_results(record, console)
    console.print(f"Results written to {run.path / 'results.json'}")
    return record


def length_baseline(items: Sequence[Item], score: Callable[[Sequence[Row]], dict[str, Any]]) -> dict[str, Any]:
    """Score rows by "the longer answer wins", in characters: the line that a reward model has to beat."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\d+ of \d+ pairs are ties")  # equal lengths are no defect
        return score([score_fields(item, [len(answer) for answer in item.answers]) for item in items])


def _length_bias(items: Sequence[Item], rows: Sequence[Row]) -> dict[str, Any]:
    prompts = [repr((item.prompt, item.ids and item.ids[0])) for item in items for _ in item.answers]
    scores, tokens = ([value for row in rows for value in row[name]] for name in ("scores", "tokens"))
    return length_bias(scores, tokens, prompts)


def main(argv: list[str]) -> None:
    """Run `segrew rewardbench`."""
    config, options = parse("rewardbench", (BenchmarkConfig, DataOptions), argv)
    run_benchmark(config, options=options)
