"""Score responses segment by segment (`segrew score`), or print them coloured (`segrew show`)."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from reward_models.scored_responses import ScoredResponse
from reward_models.segment_reward_model import SegmentRewardModel
from segrew import processes
from segrew.chat import Message
from segrew.config import arg, parse, to_dict
from segrew.conversations import TOKENS_PER_BATCH
from segrew.data_options import DataOptions
from segrew.dataset_formats import Row
from segrew.preferences import EMBEDDED_PAIRS, Fault, PreferencePair, pair_of
from segrew.prompts import prompt_of
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.sources import DataRecord, Source, load, stage_key, write_records


@dataclass(frozen=True)
class Answer:
    """A response to a prompt, with the marked faults it may have."""

    id: str
    prompt: list[Message]
    response: str
    side: str = ""
    faults: tuple[Fault, ...] = ()
    template: dict[str, Any] = field(default_factory=dict)


def answers_of_pairs(pairs: list[PreferencePair]) -> list[Answer]:
    """Return both sides of each pair as answers."""
    if ids := next((pair for pair in pairs if pair.ids), None):
        raise ValueError(
            f"{ids.where}: token ids have no text to show; `segrew rewardbench --benchmark pairs` takes them."
        )
    return [
        Answer(pair.id, pair.prompt, text, side, pair.faults if side == "rejected" else (), pair.template)
        for pair in pairs
        for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected))
    ]


def answers_in(row: Row, where: str) -> list[Answer]:
    """Return a row's answer to its prompt, or both answers of a preference pair.

    Raises:
        Unusable: there is no text in it.
        ValueError: the row has another shape; the message names file and line.
    """
    if {"chosen", "rejected"} <= set(row):
        return answers_of_pairs([pair_of(row, where, keep_identical=True)])
    response = row.get("response", row.get("completion"))
    if isinstance(response, list) and response and isinstance(response[-1], dict):
        response = response[-1].get("content")  # TRL's conversational completion
    if not isinstance(response, str) or not {"prompt", "messages"} & set(row):
        found = [f"{name} (null)" if row[name] is None else name for name in sorted(row)]
        raise ValueError(
            f"{where}: needs 'prompt' and 'response' (or 'chosen' and 'rejected'), as texts or messages; found "
            f"{', '.join(found)}."
        )
    prompt = prompt_of(row, where)
    name = where.rsplit(" ", 1)[-1] if row.get("id") is None else str(row["id"])
    return [Answer(name, prompt.messages, response, template=prompt.template)]


def load_answers(
    names: str | list[str], split: str, options: DataOptions | None = None, *, limit: int | None = None
) -> tuple[list[Answer], list[Source]]:
    """Load rows with `prompt` and `response` (or `completion`), or preference pairs, whose sides are answers each.

    Raises:
        ValueError: a row has neither; the message names file and line.
    """
    rows, sources = load(
        names, split, options or DataOptions(), answers_in, lambda row: stage_key(row[0].prompt), what="answers",
        limit=limit,
    )  # fmt: skip
    return [answer for row in rows for answer in row][:limit], sources


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


def _score(config: ScoreConfig, answers: list[Answer]) -> list[ScoredResponse]:
    reward_model = SegmentRewardModel.from_pretrained(config.reward_model)
    own = processes.share(answers)
    scored = reward_model.score(
        [answer.prompt for answer in own],
        [answer.response for answer in own],
        max_tokens=config.max_tokens_per_batch,
        description=processes.label("Scoring"),
        templates=[answer.template for answer in own],
    )
    return processes.gather_list(scored)


def main(argv: list[str]) -> None:
    """Run `segrew score`."""
    config, output, options = parse("score", (ScoreConfig, ScoreOutput, DataOptions), argv)
    claim: dict[str, Any] = {
        "command": "score", "config": to_dict(config, output, options), "overwrite": output.overwrite_output_dir
    }  # fmt: skip
    RunDirectory(output.output_dir).check(**claim)
    answers, sources = load_answers(config.dataset_name, config.dataset_split, options, limit=config.max_rows)
    scored = _score(config, answers)
    if not processes.is_main():
        return
    run = RunDirectory.create(output.output_dir, **claim)
    fitted = Counter(f"with {part} cut to fit" for result in scored for part in result.cut)
    record = DataRecord("scored", "answers", len(scored), sources, fitted)
    write_records(run.path, [record])
    records = [score_record(answer, result) for answer, result in zip(answers, scored, strict=True)]
    write_jsonl(run.path / "scores.jsonl", records)
    mean = sum(result.score for result in scored) / len(scored)
    Console().print(str(record), highlight=False, markup=False, soft_wrap=True)
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
    config, options = parse("show", (ScoreConfig, DataOptions), argv)
    console, most = Console(quiet=not processes.is_main()), config.max_rows or 6
    found, _ = load_answers(config.dataset_name, config.dataset_split, options, limit=most + 1)
    answers = found[:most]
    scored = _score(config, answers)
    normalized = scored[0].segments[0].normalized is not None
    kind = "normalized, while a score is made of rewards as read" if normalized else "as it was read"
    console.print(f"Background from orange (low) to blue (high); the number behind a segment is its reward, {kind}.")
    for answer, result in zip(answers, scored, strict=True):
        asked = answer.prompt[-1]["content"] if answer.prompt else "(whole texts, no prompt)"
        console.print(Text(f"\n> {asked}", style="italic"))
        console.print(coloured(answer, result))
    if len(found) > most:
        console.print(f"\nThese are the first {most} answers of more; --max_rows says how many are shown.")
