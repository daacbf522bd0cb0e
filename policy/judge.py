"""Two models' answers before a judge, in both orders (`segrew judge`)."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from policy.answer_files import Reply, load_questions, read_replies
from policy.chat_endpoint import ChatEndpoint, EndpointReply
from policy.judge_results import agreement, verdict_table, verdicts
from policy.judge_rubric import Rubric
from reward_models import SegmentRewardModel
from segrew.config import arg, parse, to_dict
from segrew.conversations import TOKENS_PER_BATCH
from segrew.run_directory import (
    RUN_FILE,
    RunDirectory,
    read_json,
    read_jsonl,
    require_same_settings,
    write_jsonl,
)

JUDGMENTS = "judgments.jsonl"
TURNED_DOWN = 8  # so many refusals at the start, and nothing else, end a run
# What a restarted run may change without ceasing to be the same run.
FREE_ON_RESTART = {
    "api_key_env", "workers", "max_retries", "timeout", "max_rows", "reward_model", "output_dir",
    "overwrite_output_dir", "max_tokens_per_batch",
}  # fmt: skip


@dataclass
class JudgeConfig:
    """Whose answers, before which judge."""

    answers: str = arg("", help="Answer file of the model: what `segrew generate` writes, in any of its formats.")
    baseline: str = arg("", help="Answer file of the model that it is compared with.")
    questions: str | None = arg(None, help="Question file, for answers that name their questions by question_id.")
    max_rows: int | None = arg(None, help="Judge only the first answers that both files have.")
    base_url: str = arg("", help="Of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1.")
    judge_model: str = arg("", help="The judge's name there.")
    api_key_env: str = arg("OPENAI_API_KEY", help="Environment variable that holds the key; no key is sent if unset.")
    dimensions: list[str] = arg(["helpfulness"], help="What to judge by: dimensions of the rubric.")
    rubrics: str | None = arg(None, help="YAML file of prompt and dimensions; default policy/rubrics.yaml.")
    temperature: float | None = arg(0.0, help="Of the judge; null leaves it to the endpoint.")
    max_tokens: int | None = arg(1024, help="Longest reply of the judge; null leaves it to the endpoint.")
    workers: int = arg(4, help="Requests at a time.")
    max_retries: int = arg(5, help="Tries after the first where the endpoint is busy or broken.")
    timeout: float = arg(120.0, help="Seconds that one request may take.")
    reward_model: str | None = arg(None, help="Reward-model directory whose preferences are compared with the judge's.")
    max_tokens_per_batch: int = arg(
        TOKENS_PER_BATCH, help="Tokens of a forward pass of the reward model, each prompt counted once."
    )
    output_dir: str = arg("runs/judge", help="Where judgments.jsonl and judge.json go; run again to continue.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")

    def __post_init__(self) -> None:
        for name in ("answers", "baseline", "base_url", "judge_model"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing.")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base_url {self.base_url}: must begin with http:// or https://.")
        for name, least in (("workers", 1), ("max_retries", 0), ("timeout", 0.001), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value}: must be at least {least}.")

    @property
    def endpoint(self) -> ChatEndpoint:
        """The judge."""
        key = os.environ.get(self.api_key_env, "").strip()
        return ChatEndpoint(
            self.base_url, self.judge_model, key, self.api_key_env, self.temperature, self.max_tokens, self.timeout,
            self.max_retries,
        )  # fmt: skip


@dataclass(frozen=True)
class Match:
    """Two answers to the same words; `id` is short and the same in every run."""

    id: str
    model: Reply
    baseline: Reply

    def in_order(self, order: int) -> tuple[Reply, Reply]:
        """Order 0 shows the model first, 1 the baseline."""
        return (self.model, self.baseline) if order == 0 else (self.baseline, self.model)


def load_matches(config: JudgeConfig) -> tuple[list[Match], dict[str, int]]:
    """Pair the answers of both files; count those that only one of them has.

    Raises:
        ValueError: a file cannot be read, or they have no question in common.
    """
    known = load_questions(config.questions) if config.questions else []
    questions = {question.id: question for question in known}
    model, baseline = (read_replies(path, questions) for path in (config.answers, config.baseline))
    shared = [key for key in model if key in baseline]
    if not shared:
        raise ValueError(f"{config.answers} and {config.baseline} answer no question in common.")
    unmatched = {"answers": len(model) - len(shared), "baseline": len(baseline) - len(shared)}
    ids = {key: hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16] for key in shared}
    return [Match(ids[key], model[key], baseline[key]) for key in shared[: config.max_rows]], unmatched


def open_run(config: JudgeConfig, rubric: Rubric) -> tuple[RunDirectory, list[dict[str, Any]]]:
    """Claim the directory, or continue the run that it holds, and return the judgments already there.

    Raises:
        ValueError: it holds a run with other settings, other files or another rubric, or no run of `segrew judge`.
    """
    files = {name: _digest(Path(getattr(config, name))) for name in ("answers", "baseline")}
    settings = to_dict(config) | {"rubric": rubric.digest, "digests": files}
    directory = RunDirectory(config.output_dir)
    record = directory.path / RUN_FILE
    resume = not config.overwrite_output_dir and record.is_file() and read_json(record).get("command") == "judge"
    if resume:
        matter = {name: value for name, value in settings.items() if name not in FREE_ON_RESTART}
        require_same_settings(read_json(record)["config"], matter, config.output_dir)
    run = RunDirectory.create(
        config.output_dir,
        command="judge",
        config=settings,
        overwrite=config.overwrite_output_dir,
        resume=resume or None,
    )
    path = run.path / JUDGMENTS
    done = [row for row in read_jsonl(path) if "error" not in row] if path.is_file() else []
    write_jsonl(path, done)  # without requests that were turned down, and a last line that a kill left unfinished
    return run, done


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def ask_all(
    matches: list[Match], done: list[dict[str, Any]], rubric: Rubric, endpoint: ChatEndpoint, workers: int
) -> Iterator[dict[str, Any]]:
    """Yield a judgment of every match in both orders that is not done yet, as the replies come in.

    Raises:
        ValueError: the endpoint gives up; what was yielded by then stands.
    """
    known = {(row["id"], row["order"]) for row in done}
    tasks = [(m, order) for m in matches for order in (0, 1) if (m.id, order) not in known]
    pool = ThreadPoolExecutor(workers)
    try:
        asked = {pool.submit(endpoint.ask, rubric.request(*m.in_order(order))): (m, order) for m, order in tasks}
        for future in track(as_completed(asked), "Judging", total=len(asked)):
            if future.exception() is not None:  # replies that are there, or under way, are paid for
                pool.shutdown(cancel_futures=True)
                for other in [f for f in asked if not f.cancelled() and f.exception() is None]:
                    yield _judgment(*asked[other], other.result(), rubric)
            yield _judgment(*asked.pop(future), future.result(), rubric)
    finally:
        pool.shutdown(cancel_futures=True)


def _judgment(match: Match, order: int, reply: EndpointReply, rubric: Rubric) -> dict[str, Any]:
    names = {"A": ("model", "baseline")[order], "B": ("baseline", "model")[order], "tie": "tie"}
    said = {name: letter and names[letter] for name, letter in rubric.read(reply.text).items()}
    row = {"id": match.id, "order": order, "verdicts": said, "reply": reply.text}
    return row | ({"error": reply.error} if reply.error else {})


def judge(config: JudgeConfig, console: Console | None = None) -> dict[str, Any]:
    """Ask the judge about every pair in both orders, write and print what it said.

    Raises:
        ValueError: files, rubric, directory or endpoint cannot be used; judgments made by then are kept.
    """
    console = console or Console()
    rubric = Rubric.load(config.rubrics, config.dimensions)
    matches, unmatched = load_matches(config)
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model) if config.reward_model else None
    config.endpoint.require_reachable()
    run, judgments = open_run(config, rubric)
    if judgments:
        console.print(f"Continuing: {len(judgments)} judgments are there.", highlight=False)
    for row in ask_all(matches, judgments, rubric, config.endpoint, config.workers):
        run.append(JUDGMENTS, row)
        judgments.append(row)
        if len(judgments) >= TURNED_DOWN and all("error" in one for one in judgments):
            raise ValueError(f"the judge turned down all of the first {len(judgments)} requests: {row['error']}")
    places = {match.id: i for i, match in enumerate(matches)}
    kept = sorted((row for row in judgments if row["id"] in places), key=lambda row: (places[row["id"]], row["order"]))
    results: dict[str, Any] = {"judge": config.judge_model, "unmatched": unmatched} | verdicts(kept, config.dimensions)
    results["characters"] = {
        name: sum(len(getattr(match, name).text) for match in matches) / len(matches) for name in ("model", "baseline")
    }
    if reward_model is not None:
        margins = _margins(matches, reward_model, config.max_tokens_per_batch)
        results["agreement"] = agreement(kept, margins, config.dimensions)
    run.write_json("judge.json", results)
    console.print(verdict_table(results))
    console.print(f"Judgments in {run.path / JUDGMENTS}, results in {run.path / 'judge.json'}", soft_wrap=True)
    return results


def _margins(matches: list[Match], reward_model: SegmentRewardModel, max_tokens: int) -> dict[str, float]:
    """Score of the model's answer minus the baseline's, by match."""
    sides = [reply for match in matches for reply in (match.model, match.baseline)]
    scored = reward_model.score(
        [r.prompt for r in sides], [r.text for r in sides], description="Scoring", max_tokens=max_tokens
    )
    scores = [record.score for record in scored]
    return {match.id: scores[2 * i] - scores[2 * i + 1] for i, match in enumerate(matches)}


def main(argv: list[str]) -> None:
    """Run `segrew judge`."""
    (config,) = parse("judge", (JudgeConfig,), argv)
    judge(config)
