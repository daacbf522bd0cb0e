"""Score responses segment by segment (`segrew score`), or print them coloured (`segrew show`)."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from reward_models.segment_reward_model import ScoredResponse, SegmentRewardModel
from segrew.chat import Message
from segrew.config import arg, parse, to_dict
from segrew.language_models import TOKENS_PER_BATCH
from segrew.preferences import (
    EMBEDDED_PAIRS,
    Fault,
    PreferencePair,
    as_messages,
    everyday_pairs,
    load_preferences,
    records_of,
)
from segrew.run_directory import RunDirectory, write_jsonl


@dataclass(frozen=True)
class Answer:
    """A response to a prompt, with the marked faults it may have."""

    id: str
    prompt: list[Message]
    response: str
    side: str = ""
    faults: tuple[Fault, ...] = ()


def answers_of_pairs(pairs: list[PreferencePair]) -> list[Answer]:
    """Return both sides of each pair as answers."""
    return [
        Answer(pair.id, pair.prompt, text, side, pair.faults if side == "rejected" else ())
        for pair in pairs
        for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected))
    ]


def load_answers(name_or_path: str, split: str) -> list[Answer]:
    """Load rows with `prompt` and `response` (or `completion`), or preference pairs, whose sides are rows each.

    Raises:
        ValueError: a row has neither; the message names file and line.
    """
    if name_or_path == EMBEDDED_PAIRS:
        return answers_of_pairs(everyday_pairs(split))
    answers = []
    for number, (where, row) in enumerate(records_of(name_or_path, split), 1):
        if number == 1 and {"chosen", "rejected"} <= set(row):
            return answers_of_pairs(load_preferences(name_or_path, split, keep_identical=True).pairs)
        response = row.get("response", row.get("completion"))
        if "prompt" not in row or not isinstance(response, str):
            raise ValueError(
                f"{where}: needs 'prompt' and 'response' (or 'chosen' and 'rejected'); found {', '.join(sorted(row))}."
            )
        answers.append(Answer(str(row.get("id", number)), as_messages(row["prompt"], where, "prompt"), response))
    return answers


def score_record(answer: Answer, scored: ScoredResponse) -> dict[str, Any]:
    """Return one line of `scores.jsonl`."""
    record: dict[str, Any] = {"id": answer.id, "prompt": answer.prompt, "response": answer.response}
    record |= {"score": scored.score, "segments": [asdict(segment) for segment in scored.segments]}
    if answer.side:
        record["side"] = answer.side
    if answer.faults:
        record["faults"] = [asdict(fault) for fault in answer.faults]
    return record


@dataclass
class ScoreConfig:
    """Which reward model on which answers."""

    reward_model: str = arg("runs/reward_model", help="Reward-model directory.")
    dataset_name: str = arg(EMBEDDED_PAIRS, help="Answers: rows with prompt and response, or preference pairs.")
    dataset_split: str = arg("test", help="Split of it.")
    max_rows: int | None = arg(None, help="Use only the first answers.")
    max_tokens_per_batch: int = arg(TOKENS_PER_BATCH, help="Tokens of a forward pass, each prompt counted once.")


@dataclass
class ScoreOutput:
    """Where the scores go."""

    output_dir: str = arg("runs/scores", help="Where scores.jsonl goes.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")


def _score(config: ScoreConfig) -> tuple[list[Answer], list[ScoredResponse]]:
    answers = load_answers(config.dataset_name, config.dataset_split)[: config.max_rows]
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    scored = reward_model.score(
        [answer.prompt for answer in answers],
        [answer.response for answer in answers],
        max_tokens=config.max_tokens_per_batch,
        description="Scoring",
    )
    return answers, scored


def main(argv: list[str]) -> None:
    """Run `segrew score`."""
    config, output = parse("score", (ScoreConfig, ScoreOutput), argv)
    run = RunDirectory(output.output_dir)
    run.check(overwrite=output.overwrite_output_dir)
    answers, scored = _score(config)
    run = RunDirectory.create(
        output.output_dir, command="score", config=to_dict(config, output), overwrite=output.overwrite_output_dir
    )
    records = [score_record(answer, result) for answer, result in zip(answers, scored, strict=True)]
    write_jsonl(run.path / "scores.jsonl", records)
    mean = sum(result.score for result in scored) / len(scored)
    Console().print(f"{len(scored)} answers scored, mean {mean:+.3f}, written to {run.path / 'scores.jsonl'}")


def coloured(answer: Answer, scored: ScoredResponse) -> Text:
    """Return a response with each segment on a background from orange (low) to blue (high)."""
    values = [s.reward if s.normalized is None else s.normalized for s in scored.segments]
    middle = sum(values) / len(values) if scored.segments[0].normalized is None else 0.0
    widest = max((abs(v - middle) for v in values), default=0.0) or 1.0
    text = Text(f"{answer.id} {answer.side}  score {scored.score:+.3f}\n", style="bold")
    for segment, value in zip(scored.segments, values, strict=True):
        share = (value - middle) / widest
        weak = int(255 - 150 * abs(share))
        red, green, blue = (weak, int(255 - 75 * share), 255) if share > 0 else (255, int(255 + 90 * share), weak)
        text.append(segment.text, style=f"black on #{red:02x}{green:02x}{blue:02x}")
        text.append(f"{value:+.1f}", style="dim")
    return text


def show(argv: list[str]) -> None:
    """Run `segrew show`."""
    (config,) = parse("show", (ScoreConfig,), argv)
    config.max_rows = config.max_rows or 6
    console = Console()
    answers, scored = _score(config)
    console.print("Background from orange (low) to blue (high); the number behind a segment is its reward.")
    for answer, result in zip(answers, scored, strict=True):
        console.print(Text(f"\n> {answer.prompt[-1]['content']}", style="italic"))
        console.print(coloured(answer, result))
