"""A response's text with the characters of each token: what rules that read text are given."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class ResponseText:
    """Text of a response, and where its tokens are in it.

    Args:
        text: without stop or other special tokens.
        spans: characters [start, end) of each token. Tokens of one character all cover it; a token without text
            covers nothing.
    """

    text: str
    spans: Sequence[tuple[int, int]]

    @property
    def continues(self) -> list[bool]:
        """Whether each token begins inside a character that an earlier token began."""
        ends = [0, *(end for _, end in self.spans)]
        return [start < end for (start, _), end in zip(self.spans, ends, strict=False)]

    @cached_property
    def heads(self) -> list[int]:
        """The character by which each token belongs to a unit: its first that is no space, else its first."""
        heads = []
        for start, end in self.spans:
            bare = self.text[start:end].lstrip()
            heads.append(end - len(bare) if bare else start)
        return heads

    def count(self, start: int, end: int) -> int:
        """Tokens of the characters [start, end)."""
        return bisect_left(self.heads, end) - bisect_left(self.heads, start)

    def token_spans(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """Turn units that begin at these characters, in order, into spans of tokens that tile the response.

        A unit begins with the token that brings its first character, or with the next one where that character is
        inside a token; units that no token is left for vanish. The first unit begins with the response.
        """
        first = {0, *(bisect_left(self.heads, start) for start in starts[1:])}
        edges = [*sorted(j for j in first if j < len(self.spans)), len(self.spans)]
        return list(pairwise(edges))
