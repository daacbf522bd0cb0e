"""What Arena-Hard's style control wants to know of an answer: its length in tokens and its markdown."""

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

from segrew.chat import ChatFormat

_CODE_BLOCK = re.compile(r"```[^`]*```")


def markdown_counts(text: str) -> dict[str, dict[str, int]]:
    """Count headers, list items and bold stretches outside code blocks, for Arena-Hard's style control."""
    prose = _CODE_BLOCK.sub("", text)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, prose, re.MULTILINE))

    return {
        "header_count": {f"h{level}": count(rf"^#{{{level}}}\s") for level in range(1, 7)},
        "list_count": {"ordered": count(r"^\s*\d+\.\s"), "unordered": count(r"^\s*[-*+]\s")},
        "bold_count": {"**": count(r"\*\*[^*\n]+\*\*"), "__": count(r"__[^_\n]+__")},
    }


def token_counter(chat: ChatFormat) -> tuple[Callable[[str], int], str]:
    """Return how Arena-Hard's `token_len` is counted, and in whose tokens.

    GPT-4o's, if tiktoken is installed with that vocabulary in its cache; else the policy's.
    """
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.path.join(gettempdir(), "data-gym-cache"))
    vocabulary = "fb374d419588a4632f3f557e76b4b70aebbca790"  # o200k_base, as tiktoken names it there
    if find_spec("tiktoken") and (Path(cache) / vocabulary).is_file():
        import tiktoken

        encoding = tiktoken.encoding_for_model("gpt-4o")
        return lambda text: len(encoding.encode(text, disallowed_special=())), "gpt-4o (tiktoken)"
    return lambda text: len(chat.response_ids(text)) - 1, f"the policy's own ({chat.tokenizer.name_or_path})"
