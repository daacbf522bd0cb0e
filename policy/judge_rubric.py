"""What a judge is asked, read from a file, and how its reply is read."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from policy.answer_files import Reply
from segrew.chat import Message
from segrew.config import read_yaml

RUBRICS = Path(__file__).with_name("rubrics.yaml")
_MARKS = r"(?:[^\w\n]|_)*"  # what surrounds words in markdown
_PLACES = {"request", "first", "second", "dimensions", "verdicts"}


def _transcript(messages: list[Message]) -> str:
    """The words of a conversation; a single message stands for itself."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


@dataclass(frozen=True)
class Rubric:
    """A prompt, and the dimensions that are asked for with their descriptions."""

    prompt: str
    dimensions: dict[str, str]

    @classmethod
    def load(cls, path: str | None, names: list[str]) -> "Rubric":
        """Read the prompt and the named dimensions.

        Raises:
            ValueError: the file is of another shape, or has no such dimension.
        """
        content = read_yaml(path or RUBRICS, "--rubrics")
        prompt, known = content.get("prompt"), content.get("dimensions")
        if not isinstance(prompt, str) or not isinstance(known, dict):
            raise ValueError(f"--rubrics {path}: needs 'prompt', a text, and 'dimensions', names with their texts.")
        try:
            places = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
        except ValueError as error:
            raise ValueError(f"--rubrics {path}: 'prompt' has a stray brace ({error}); double it.") from None
        if places != _PLACES:
            odd = ", ".join(f"{{{name}}}" for name in sorted(places ^ _PLACES))
            raise ValueError(f"--rubrics {path}: 'prompt' has too much or too little of {odd}.")
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise ValueError(f"--dimensions {' '.join(missing)}: not in the rubric, which has {', '.join(known)}.")
        return cls(prompt, {name: str(known[name]) for name in names})

    @property
    def digest(self) -> str:
        """Short hash of every word of it."""
        return hashlib.sha256(f"{self.prompt}{self.dimensions}".encode()).hexdigest()[:16]

    def request(self, first: Reply, second: Reply) -> str:
        """The message to the judge. In later turns an answer is shown with the conversation that led to it."""
        request, shown = _transcript(first.prompt), [first.text, second.text]
        if first.prompt != second.prompt:
            request = _transcript([message for message in first.prompt if message["role"] != "assistant"])
            shown = [_transcript([*r.prompt, {"role": "assistant", "content": r.text}]) for r in (first, second)]
        return self.prompt.format(
            request=request,
            first=shown[0],
            second=shown[1],
            dimensions="\n".join(f"- {name}: {text}" for name, text in self.dimensions.items()),
            verdicts="\n".join(f"{name}:" for name in self.dimensions),
        )

    def read(self, reply: str) -> dict[str, str | None]:
        """Find the verdict on each dimension, "A", "B" or "tie", on a line of its own; None where there is none."""
        found: dict[str, str | None] = {}
        for name in self.dimensions:
            line = rf"^{_MARKS}{re.escape(name)}{_MARKS}:{_MARKS}(?:answer )?(A|B|tie){_MARKS}$"
            said = re.findall(line, reply, re.IGNORECASE | re.MULTILINE)
            letter = said[-1].upper() if said else None
            found[name] = "tie" if letter == "TIE" else letter
        return found
