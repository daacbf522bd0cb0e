"""Where phrases begin in a response, from the dependency parse of a spaCy pipeline (extra `segrew[parse]`)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any


@lru_cache(maxsize=2)
def load_parser(name: str) -> Any:
    """Load a spaCy pipeline by the name of its package or its path.

    Raises:
        ValueError: spaCy or the pipeline is not installed.
    """
    try:
        import spacy
    except ImportError:
        raise ValueError(
            "rule constituency parses responses with spaCy, which is not installed: pip install 'segrew[parse]'."
        ) from None
    try:
        return spacy.load(name, exclude=["ner", "lemmatizer", "textcat"])
    except OSError as error:
        raise ValueError(
            f"--parser {name}: no such spaCy pipeline is installed, and no directory holds one "
            f"({str(error).splitlines()[0]}); run `python -m spacy download {name}`, or pass the path of a pipeline."
        ) from None


def parser_identity(name: str) -> dict[str, str]:
    """Name pipeline and library with their versions; the same pipeline is the same from any path."""
    meta = load_parser(name).meta
    return {"parser": f"{meta['lang']}_{meta['name']} {meta['version']}", "spacy": version("spacy")}


def parsed(texts: Iterator[str], name: str) -> Iterator[Any]:
    """Parse texts, in order.

    Raises:
        ValueError: the pipeline has no parser.
    """
    pipeline = load_parser(name)
    for document in pipeline.pipe(texts):
        if len(document) and not document.has_annotation("DEP"):
            raise ValueError(
                f"--parser {name}: this pipeline parses nothing (its components: "
                f"{', '.join(pipeline.pipe_names) or 'none'}); pass one with a dependency parser."
            )
        yield document


def phrase_starts(document: Any, max_words: int) -> list[int]:
    """Return the first character of each phrase of at most `max_words` words (2410.02743, section 3.2).

    Each sentence is taken apart from the top: a subtree of at most `max_words` is a phrase; from a larger one its
    dependents on the left are split off, then what is left, its head with what follows, if that is short enough,
    and at last the dependents on the right. Single words join the phrase before them in their sentence.
    """
    words = [token for token in document if not token.is_space]
    tree = _Tree(words)
    starts = {tree.low[root] for root in tree.roots}
    queue = list(tree.roots)
    while queue:
        k = queue.pop()
        left = [child for child in tree.children[k] if child < k]
        right = [child for child in tree.children[k] if child > k]
        if tree.size[k] <= max_words and tree.size[k] == tree.high[k] - tree.low[k] + 1:
            if tree.size[k] > 1:
                starts.add(tree.low[k])
            continue
        queue += left
        inner = _without_final_marks(right, words, tree)
        size = 1 + sum(tree.size[child] for child in inner)
        if inner and size <= max_words and size == max(tree.high[child] for child in inner) - k + 1:
            starts.add(k)
            continue
        queue += right
    return sorted(words[k].idx for k in starts)


def _without_final_marks(right: list[int], words: Sequence[Any], tree: "_Tree") -> list[int]:
    while right and tree.size[right[-1]] == 1 and words[right[-1]].is_punct:
        right = right[:-1]
    return right


class _Tree:
    """Dependencies among words: children, and size and outermost words of the subtree of each."""

    def __init__(self, words: Sequence[Any]):
        number = {word.i: k for k, word in enumerate(words)}
        count = len(words)
        heads = [number.get(word.head.i, k) for k, word in enumerate(words)]
        self.roots = [k for k in range(count) if heads[k] == k]
        self.children: list[list[int]] = [[] for _ in range(count)]
        self.size, self.low, self.high = [0] * count, list(range(count)), list(range(count))
        for k in range(count):
            if heads[k] != k:
                self.children[heads[k]].append(k)
            above = k
            while True:
                self.size[above] += 1
                self.low[above], self.high[above] = min(self.low[above], k), max(self.high[above], k)
                if heads[above] == above:
                    break
                above = heads[above]
