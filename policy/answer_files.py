"""Questions and answers as the files of AlpacaEval, Arena-Hard and MT-Bench hold them, or as plain JSON lines.

What a row is shows in its columns, so files of any of these shapes can be read without saying which.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy.answer_style import markdown_counts
from segrew.chat import Message
from segrew.preferences import EMBEDDED_PAIRS, as_messages, everyday_pairs
from segrew.records import read_records, records_of
from segrew.run_directory import write_json, write_jsonl


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    Args:
        messages: up to where the assistant first speaks.
        follow_ups: what the user says after the first answer, the second, …
        row: the question as its file has it. where: file and line.
    """

    id: str
    messages: list[Message]
    follow_ups: list[str] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def turns(self) -> int:
        """How many answers it takes."""
        return 1 + len(self.follow_ups)

    def name(self, turn: int) -> str:
        """Identity of one turn, counted from 0."""
        return self.id if self.turns == 1 else f"{self.id}/{turn + 1}"

    def prompt(self, answers: list[str]) -> list[Message]:
        """The conversation up to the next answer, given those before it."""
        messages = list(self.messages)
        for answer, follow_up in zip(answers, self.follow_ups, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
        return messages


@dataclass(frozen=True)
class Author:
    """Who answered: the name in the files, and how the length of an answer is counted."""

    name: str
    count_tokens: Callable[[str], int]


def question_of(row: dict[str, Any], where: str, number: int) -> Question:
    """Read a question of any benchmark, or a row with `prompt` or `messages`.

    Raises:
        ValueError: the row holds nothing to answer; the message names file and line.
    """
    column = next((name for name in ("turns", "instruction", "prompt", "messages") if row.get(name)), None)
    if column is None:
        raise ValueError(
            f"{where}: no 'prompt', 'messages', 'instruction' or 'turns' (found: {', '.join(sorted(row))})."
        )
    later: list[Any] = []
    if column == "turns":
        first, *later = [turn.get("content") if isinstance(turn, dict) else turn for turn in row["turns"]]
        messages = as_messages(first, where, column)
    else:
        messages = as_messages(row[column], where, column)
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    texts = [*(message["content"] for message in messages), *later]
    if not messages or not all(isinstance(text, str) for text in texts) or not texts[-1].strip():
        raise ValueError(f"{where}: column '{column}' holds no text to answer.")
    name = next((row[name] for name in ("uid", "question_id", "id") if row.get(name) is not None), number)
    return Question(str(name), messages, later, row, where)


def load_questions(name_or_path: str, split: str = "train") -> list[Question]:
    """Load questions from a file, a directory, the hub, or the prompts of the embedded pairs ("everyday").

    Raises:
        ValueError: what is wrong, in which file and line.
    """
    if name_or_path == EMBEDDED_PAIRS:
        return [Question(pair.id, pair.prompt, where=pair.id) for pair in everyday_pairs(split)]
    rows = enumerate(records_of(name_or_path, split), 1)
    return [question_of(row, where, number) for number, (where, row) in rows]


def _plain(question: Question, answers: list[str], author: Author) -> list[dict[str, Any]]:
    return [
        {"id": question.name(turn), "prompt": question.prompt(answers[:turn]), "response": answer, "model": author.name}
        for turn, answer in enumerate(answers)
    ]


def _alpaca_eval(question: Question, answers: list[str], author: Author) -> list[dict[str, Any]]:
    row = {"dataset": question.row["dataset"]} if "dataset" in question.row else {}
    return [row | {"instruction": question.row["instruction"], "output": answers[0], "generator": author.name}]


def _choices(question: Question, turns: list[Any], author: Author) -> dict[str, Any]:
    return {
        "question_id": question.row["question_id"],
        "answer_id": uuid.uuid4().hex,
        "model_id": author.name,
        "choices": [{"index": 0, "turns": turns}],
        "tstamp": time.time(),
    }


def _mt_bench(question: Question, answers: list[str], author: Author) -> list[dict[str, Any]]:
    return [_choices(question, answers, author)]


def _arena_hard(question: Question, answers: list[str], author: Author) -> list[dict[str, Any]]:
    """v2 names its questions `uid`, v0.1 `question_id`."""
    lengths = [author.count_tokens(answer) for answer in answers]
    style = {"token_len": sum(lengths), **markdown_counts("\n".join(answers))}
    if "uid" not in question.row:
        turns = [{"content": text, "token_len": n} for text, n in zip(answers, lengths, strict=True)]
        return [_choices(question, turns, author) | {"conv_metadata": style}]
    messages: list[dict[str, Any]] = [*question.messages, {"role": "assistant", "content": {"answer": answers[0]}}]
    row = {"uid": question.row["uid"], "ans_id": uuid.uuid4().hex, "model": author.name, "messages": messages}
    return [row | {"tstamp": time.time(), "metadata": style}]


@dataclass(frozen=True)
class AnswerFormat:
    """One kind of answer file.

    Args:
        file: its place in the run directory. needs: columns of a question, one of which it takes over.
        rows: what an answered question becomes.
    """

    file: str
    needs: tuple[str, ...]
    rows: Callable[[Question, list[str], Author], list[dict[str, Any]]]

    def check(self, questions: list[Question], name: str) -> None:
        """Refuse questions that are not of this benchmark.

        Raises:
            ValueError: naming the first one's file and line.
        """
        for question in questions:
            if self.needs and not any(question.row.get(column) is not None for column in self.needs):
                raise ValueError(
                    f"{question.where or question.id}: --format {name} needs questions with "
                    f"{' or '.join(map(repr, self.needs))}; take the benchmark's own question file, or --format jsonl."
                )

    def write(self, directory: Path, questions: list[Question], answers: list[list[str]], author: Author) -> Path:
        """Write the answers of one model and return where."""
        path = directory / self.file.format(name=author.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs = zip(questions, answers, strict=True)
        rows = [row for question, texts in pairs for row in self.rows(question, texts, author)]
        (write_json if path.suffix == ".json" else write_jsonl)(path, rows)
        return path


FORMATS = {
    "jsonl": AnswerFormat("answers.jsonl", (), _plain),
    "alpaca_eval": AnswerFormat("model_outputs.json", ("instruction",), _alpaca_eval),
    "arena_hard": AnswerFormat("model_answer/{name}.jsonl", ("uid", "question_id"), _arena_hard),
    "mt_bench": AnswerFormat("model_answer/{name}.jsonl", ("question_id",), _mt_bench),
}


@dataclass(frozen=True)
class Reply:
    """One answer in its conversation.

    Args:
        key: equal for answers of other models to the same words of the user.
        prompt: the messages before it, other answers of the same model included.
    """

    key: str
    prompt: list[Message]
    text: str


def read_replies(path: str, questions: dict[str, Question]) -> dict[str, Reply]:
    """Read a file of answers in any of the formats; every turn is a reply.

    Args:
        questions: by id, for files that name their questions by `question_id` only.

    Raises:
        ValueError: what is wrong, in which file and line.
    """
    replies: dict[str, Reply] = {}
    seen: Counter[str] = Counter()
    for where, row in read_records(path):
        prompt, answers, follow_ups = _conversation(row, where, questions)
        if not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"{where}: an answer that is no text.")
        question = Question("", prompt, follow_ups)
        for turn, answer in enumerate(answers):
            messages = question.prompt(answers[:turn])
            asked = json.dumps([[m["role"], m["content"]] for m in messages if m["role"] != "assistant"])
            key = f"{asked} {seen[asked]}" if seen[asked] else asked
            seen[asked] += 1
            replies[key] = Reply(key, messages, answer)
    return replies


def _conversation(
    row: dict[str, Any], where: str, questions: dict[str, Question]
) -> tuple[list[Message], list[Any], list[str]]:
    """The first prompt, the answers, and the user's words between them."""
    if "output" in row and "instruction" in row:
        return as_messages(row["instruction"], where, "instruction"), [row["output"]], []
    if "choices" in row:
        name = str(row.get("question_id"))
        if name not in questions:
            raise ValueError(
                f"{where}: no question {name!r} at hand; name the benchmark's question file (--questions)."
            )
        try:
            turns = row["choices"][0]["turns"]
            answers = [turn["content"] if isinstance(turn, dict) else turn for turn in turns]
        except (IndexError, KeyError, TypeError):
            raise ValueError(f"{where}: 'choices' holds no turns.") from None
        return questions[name].messages, answers, questions[name].follow_ups
    if "uid" in row and isinstance(row.get("messages"), list) and row["messages"]:
        *prompt, last = row["messages"]
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
        answer = content.get("answer") if isinstance(content, dict) else content
        return as_messages(prompt, where, "messages"), [answer], []
    answer = row.get("response", row.get("completion"))
    if "prompt" in row and answer is not None:
        return as_messages(row["prompt"], where, "prompt"), [answer], []
    raise ValueError(
        f"{where}: no answer found. A row has 'prompt' and 'response', 'instruction' and 'output' (AlpacaEval), 'uid' "
        f"and 'messages' (Arena-Hard), or 'question_id' and 'choices' (MT-Bench); found: {', '.join(sorted(row))}."
    )
