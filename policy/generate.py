"""Answers of a policy in the benchmarks' formats, the best of N of them if asked (`segrew generate`)."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from policy.answer_files import FORMATS, Author, Question, load_questions
from policy.answer_style import token_counter
from policy.answering import Answerer
from policy.best_of import Candidates, SftColumns, plot_sweep, sweep_row, write_training_sets
from policy.compare_scores import scores_before, write_comparison
from policy.engines import EngineSettings
from policy.sampling import Sampling
from reward_models import SegmentRewardModel
from reward_models.checkpoints import find_checkpoint as find_reward_model
from segrew import processes
from segrew.chat import ChatFormat
from segrew.config import arg, parse, to_dict
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import EMBEDDED_PAIRS
from segrew.run_directory import RunDirectory, write_jsonl

# MT-Bench's own (FastChat).
CATEGORY_TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "extraction": 0.0, "math": 0.0, "coding": 0.0,
                         "reasoning": 0.0, "stem": 0.1, "humanities": 0.1}  # fmt: skip


@dataclass
class GenerateConfig(EngineSettings):
    """Which policy answers which questions, and how."""

    model_name_or_path: str = arg(
        EMBEDDED_MODEL, help="Policy: a directory, a LoRA adapter's directory, or a hub name."
    )
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    model_id: str | None = arg(None, help="The policy's name in the files; default the last part of its path.")
    dataset_name: str = arg(
        EMBEDDED_PAIRS, help="Prompts or a benchmark's question file; or a hub name, or 'everyday'."
    )
    dataset_split: str = arg("test", help="Split of it.")
    max_rows: int | None = arg(None, help="Answer only the first questions.")
    format: Literal["jsonl", "alpaca_eval", "arena_hard", "mt_bench"] = arg("jsonl", help="Of the answer file.")
    temperatures: list[float] | None = arg(
        None, help="One or several; 0 is greedy. Default 1, or MT-Bench's by category.", aliases=["--temperature"]
    )
    max_new_tokens: int = arg(512, help="Longest answer.")
    stop_token_ids: list[int] = arg([], help="Stop tokens besides the chat template's.")
    stop_strings: list[str] = arg([], help="Texts that end an answer.")
    best_of: list[int] = arg([1], help="Keep the best of N by the reward model; several N for a sweep over one draw.")
    reward_model: str | None = arg(None, help="Reward-model directory that scores every answer.")
    compare_to: str | None = arg(None, help="An earlier run's directory or scores.jsonl: gains in score since then.")
    sft_columns: SftColumns = arg("messages", help="Columns of sft.jsonl, the best answers as TRL takes them.")
    per_device_eval_batch_size: int = arg(16, help="Answers drawn at a time.")
    output_dir: str = arg("runs/generate", help="Where the answers and scores go.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")
    seed: int = arg(0, help="Of sampling.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.best_of or min(self.best_of) < 1:
            raise ValueError(f"--best_of {self.best_of}: each N must be at least 1.")
        if self.model_id is not None and not self.model_id.replace(".", "").replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"--model_id {self.model_id}: it names files, so letters, digits, '.', '-' and '_' only.")
        for name, value in (("best_of", self.most > 1), ("compare_to", self.compare_to)):
            if value and self.reward_model is None:
                raise ValueError(f"--{name} needs scores; name a reward model with --reward_model.")
        for temperature in self.temperatures or ():
            if not 0 <= temperature < math.inf:
                raise ValueError(f"--temperatures {temperature}: must be positive, or 0 for the likeliest tokens.")
        _ = self.sampling  # refuses its own bad values

    @property
    def most(self) -> int:
        """How many answers are drawn to each prompt."""
        return max(self.best_of)

    @property
    def name(self) -> str:
        """The policy's name in the files."""
        return self.model_id or Path(self.model_name_or_path).resolve().name

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn, but for the temperature."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            stop_strings=tuple(self.stop_strings),
            batch_size=self.per_device_eval_batch_size,
        )

    def temperature_of(self, question: Question, chosen: float | None) -> float:
        """The chosen temperature, or the benchmark's own.

        Raises:
            ValueError: MT-Bench has none for this category, or all N answers would be the same.
        """
        temperature = chosen
        if chosen is None and self.format == "mt_bench":
            category = question.row.get("category")
            temperature = CATEGORY_TEMPERATURES.get(str(category))
            if temperature is None:
                raise ValueError(
                    f"{question.where}: MT-Bench has no temperature for category {category!r}; pass --temperatures."
                )
        temperature = 1.0 if temperature is None else temperature
        if temperature == 0 and self.most > 1:
            raise ValueError(
                f"--best_of {self.most}: {question.where or question.id} is answered at temperature 0, where all N "
                "answers are the same; pass positive --temperatures."
            )
        return temperature


def generate(config: GenerateConfig, console: Console | None = None) -> Path:
    """Answer every question and write the answers; what can be refused is refused before anything is written.

    Raises:
        ValueError: the questions, the models or the directory cannot be used.
    """
    console = console or Console(quiet=not processes.is_main())
    questions = load_questions(config.dataset_name, config.dataset_split)[: config.max_rows]
    FORMATS[config.format].check(questions, config.format)
    temperatures = list(dict.fromkeys(config.temperatures)) if config.temperatures else [None]
    for temperature in temperatures:
        _ = [config.temperature_of(question, temperature) for question in questions]
    claim: dict[str, Any] = {
        "command": "generate", "config": to_dict(config), "overwrite": config.overwrite_output_dir
    }  # fmt: skip
    RunDirectory(config.output_dir).check(**claim)
    prompts = [question.messages for question in questions]
    before = scores_before(config.compare_to, str(config.reward_model), prompts) if config.compare_to else None
    answerer = _load(config)
    answerer.check_room(questions)
    run: RunDirectory | None = None
    draws, sweep = [], []
    for temperature in temperatures:
        temperature_of = partial(config.temperature_of, chosen=temperature)
        own, seed = processes.share(questions), config.seed + processes.rank()
        answered = processes.gather_list(answerer.answer(own, temperature_of, config.most, seed) if own else [])
        if not processes.is_main():
            continue
        run = run or RunDirectory.create(config.output_dir, **claim)
        label = f"t{temperature:g}" if len(temperatures) > 1 else ""
        draws.append(_write(run.path / label, label, questions, answered, answerer, config))
        candidates = [one for turns in answered for one in turns]
        sweep += [sweep_row(candidates, temperature, n) for n in sorted(set(config.best_of)) if config.reward_model]
        if before is not None:
            write_comparison(run.path / label, before, candidates, console)
    if run is not None:  # in the process that writes
        _finish(run, draws, sweep, answerer, config, console)
    return Path(config.output_dir)


def _load(config: GenerateConfig) -> Answerer:
    if config.reward_model is not None:
        find_reward_model(config.reward_model)
    chat = ChatFormat.from_tokenizer(load_tokenizer(config.model_name_or_path), config.chat_template)
    config.sampling.check(chat)
    model = load_causal_lm(config.model_name_or_path)
    scorer = None if config.reward_model is None else SegmentRewardModel.from_pretrained(config.reward_model)
    return Answerer(model, chat, scorer, config.sampling, config.engine(chat))


def _write(
    directory: Path,
    label: str,
    questions: list[Question],
    answered: list[list[Candidates]],
    answerer: Answerer,
    config: GenerateConfig,
) -> dict[str, Any]:
    """Write the answers of one temperature, their scores and the sets made of them; return what to say of it."""
    candidates = [one for turns in answered for one in turns]
    texts = [[one.texts[one.best] for one in turns] for turns in answered]
    author = Author(f"{config.name}-{label}" if label else config.name, token_counter(answerer.chat)[0])
    path = FORMATS[config.format].write(directory, questions, texts, author)
    if config.reward_model is not None:
        write_jsonl(directory / "scores.jsonl", [row for one in candidates for row in one.rows()])
    temperatures = sorted({one.temperature for one in candidates})
    return {
        "file": str(path),
        "sampling": [config.sampling.at(temperature).effective(answerer.chat) for temperature in temperatures],
        "answers": sum(len(one.texts) for one in candidates),
        "cut_off": sum(not ended for one in candidates for ended in one.ended),
        "empty": sum(not text.strip() for one in candidates for text in one.texts),
        "training_sets": write_training_sets(directory, candidates, config.sft_columns) if config.most > 1 else {},
    }


def _finish(
    run: RunDirectory,
    draws: list[dict[str, Any]],
    sweep: list[dict[str, Any]],
    answerer: Answerer,
    config: GenerateConfig,
    console: Console,
) -> None:
    _, counted_in = token_counter(answerer.chat)
    metadata = {"model_id": config.name, "token_len": counted_in, "scored_on": answerer.scored_on, "draws": draws}
    run.write_json("metadata.json", metadata)
    if sweep:
        run.write_json("best_of.json", sweep)
        plot_sweep(sweep, run.path / "best_of.svg")
    for row in sweep:
        at = "" if row["temperature"] is None else f"temperature {row['temperature']:g}, "
        low, high = row["ci95"]
        console.print(f"{at}best of {row['best_of']}: {row['score']:+.3f} ({low:+.3f} to {high:+.3f})", highlight=False)
    for draw in draws:
        counts = f"{draw['answers']} answers, {draw['cut_off']} cut off at --max_new_tokens, {draw['empty']} empty"
        console.print(f"{counts}; written to {draw['file']}", highlight=False, soft_wrap=True)


def main(argv: list[str]) -> None:
    """Run `segrew generate`."""
    (config,) = parse("generate", (GenerateConfig,), argv)
    generate(config)
