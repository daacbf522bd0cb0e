"""Rules that read text: text → characters where units begin → spans of tokens → `segment_by_spans`.

Splitter and parser are imported by the rule that uses them, when it does.
"""

import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import torch
from jaxtyping import Bool
from torch import Tensor

from segrew.response_text import ResponseText
from segrew.segmentation import SegmentationConfig
from segrew.unit_rules import segment_by_spans
from segrew.units import Segmentation


def segment_by_sentence(
    texts: Sequence[ResponseText], mask: Bool[Tensor, "b t"], *, language: str = "en"
) -> Segmentation:
    """Every sentence is a unit, and so is every line of a list or of fenced code."""
    from segrew.sentences import sentence_starts

    return segment_by_spans([text.token_spans(sentence_starts(text.text, language)) for text in texts], mask)


def segment_by_python_ast(
    texts: Sequence[ResponseText], mask: Bool[Tensor, "b t"], *, max_code_tokens: int, language: str = "en"
) -> Segmentation:
    """Statements and expressions of at most C tokens are units, in prose sentences (2410.02743, section 3.2)."""
    from segrew.python_code import code_starts

    return segment_by_spans([text.token_spans(code_starts(text, max_code_tokens, language)) for text in texts], mask)


def segment_by_constituency(
    texts: Sequence[ResponseText], mask: Bool[Tensor, "b t"], *, parser: str, max_phrase_words: int
) -> Segmentation:
    """Phrases of at most C words are units (2410.02743, section 3.2).

    Where a phrase begins inside a token, every token of that response is a unit, and `fallback` says so.
    """
    from segrew.phrases import parsed, phrase_starts

    spans, fallback = [], []
    documents = parsed((text.text for text in texts), parser)
    for text, document in zip(texts, documents, strict=True):
        starts = phrase_starts(document, max_phrase_words)
        fallback.append(not set(starts) <= set(text.heads))
        spans.append([(j, j + 1) for j in range(len(text.spans))] if fallback[-1] else text.token_spans(starts))
    cut = segment_by_spans(spans, mask)
    return Segmentation(cut.ids, cut.bound, torch.tensor(fallback, dtype=torch.bool, device=mask.device))


def software_of(config: SegmentationConfig) -> dict[str, str]:
    """Name the splitter or parser of a rule with its version, which decides cuts as its settings do.

    Raises:
        ValueError: it is not installed.
    """
    if config.rule == "constituency":
        from segrew.phrases import parser_identity

        return parser_identity(config.parser)
    return {"sentencex": version("sentencex")} if "language" in config.reads else {}


def warn_of_fallbacks(cuts: Iterable[Segmentation]) -> None:
    """Warn once, with their share, of responses that a parsing rule could not be applied to."""
    flags = [cut.fallback for cut in cuts if cut.fallback is not None]
    rows, total = sum(int(flag.sum()) for flag in flags), sum(len(flag) for flag in flags)
    if rows:
        warnings.warn(
            f"{rows} of {total} responses ({rows / total:.1%}) have phrases that begin inside a token; there every "
            "token is a unit.",
            stacklevel=2,
        )
