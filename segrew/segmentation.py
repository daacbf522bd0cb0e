"""Where units end: the `Segmentation` record, one plug-in table of rules, and what a stop token does to it.

A unit is a run of response tokens: a segment when rewards are read, a macro action when advantages are
computed. Every rule partitions the response and knows no stop token; `join_stop` comes after it.
"""

import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from segrew.masking import full_precision
from segrew.response_text import ResponseText
from segrew.unit_rules import (
    ReadPosition,
    WhenExhausted,
    join_stop,
    leave_out_stop,
    read_columns,
    segment_by_boundaries,
    segment_by_entropy,
    segment_by_ngram,
    segment_by_perplexity,
    segment_by_random_ngram,
    segment_by_response,
    segment_by_spans,
    segment_by_token,
    whole_characters,
)
from segrew.units import Segmentation, response_index

__all__ = [
    "RULES", "Compat", "ReadPosition", "Rule", "Segmentation", "SegmentationConfig", "WhenExhausted", "join_stop",
    "leave_out_stop", "read_columns", "segment", "segment_by_boundaries", "segment_by_entropy", "segment_by_ngram",
    "segment_by_perplexity", "segment_by_random_ngram", "segment_by_response", "segment_by_spans",
    "segment_by_token", "whole_characters",
]  # fmt: skip

Rule = Literal[
    "entropy", "token", "response", "ngram", "random_ngram", "perplexity", "sentence", "constituency", "python_ast"
]
Compat = Literal["dense_rlhf_release"]


# A rule reads what its parameters name: `mask`, an input of `segment` or a field of `SegmentationConfig`.
# One that needs more than tensors is named by "module:function" and imported when it is used.
RULES: dict[str, Callable[..., Segmentation] | str] = {
    "entropy": segment_by_entropy,
    "token": segment_by_token,
    "response": segment_by_response,
    "ngram": segment_by_ngram,
    "random_ngram": segment_by_random_ngram,
    "perplexity": segment_by_perplexity,
    "sentence": "segrew.text_rules:segment_by_sentence",
    "constituency": "segrew.text_rules:segment_by_constituency",
    "python_ast": "segrew.text_rules:segment_by_python_ast",
}


@dataclass(frozen=True)
class SegmentationConfig:
    """A segmentation rule with its settings.

    Attributes:
        rule: where units end.
        threshold: entropy rule, in nats.
        quantile: entropy rule, the threshold as a quantile of the segmenter's own entropy (default 0.8).
        target_length: entropy rule, the threshold that gives units of this mean length.
        resolved: `threshold` came out of `quantile` or `target_length`, which stay as its provenance.
        n: ngram rule, tokens of a unit; None takes the whole response.
        lengths, repeats, when_exhausted: random n-gram rule.
        language: sentence rule and the prose of the python_ast rule, an ISO 639 code.
        max_phrase_words: constituency rule, the most words of a phrase (C of 2410.02743).
        parser: constituency rule, name or path of a spaCy pipeline.
        max_code_tokens: python_ast rule, the most tokens of a statement or expression.
        compat: dense_rlhf_release cuts as the code of 2501.02790 does: the stop token is in no unit, but for rule
            response, and a unit may begin inside a character. Its token level is threshold 0.
    """

    rule: Rule = "entropy"
    threshold: float | int | None = None
    quantile: float | None = None
    target_length: float | int | None = None
    resolved: bool = False
    n: int | None = 5
    lengths: tuple[int, ...] = (2, 3, 5, 10)
    repeats: int = 3
    when_exhausted: WhenExhausted = "remainder"
    language: str = "en"
    max_phrase_words: int = 5
    parser: str = "en_core_web_sm"
    max_code_tokens: int = 10
    compat: Compat | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown segmentation rule {self.rule!r}: choose one of {', '.join(RULES)}")
        if self.compat not in (None, *get_args(Compat)):
            raise ValueError(f"unknown compat {self.compat!r}: there is {', '.join(get_args(Compat))}, or none")
        if self.compat and self.rule not in ("entropy", "response"):
            raise ValueError(
                f"compat {self.compat} knows the rules entropy and response, not {self.rule!r}; its token level is "
                "rule entropy with threshold 0"
            )
        object.__setattr__(self, "lengths", tuple(self.lengths))
        given = [name for name in ("threshold", "quantile", "target_length") if getattr(self, name) is not None]
        for name in given:
            object.__setattr__(self, name, float(getattr(self, name)))  # 2 and 2.0 have one fingerprint
        if self.rule == "entropy" and not given:
            object.__setattr__(self, "quantile", 0.8)
        if len(given) > 1 and not self.resolved:
            raise ValueError(f"{' and '.join(given)} exclude each other: each of them sets the entropy threshold")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(
                f"threshold {self.threshold} is no number of nats; for cuts everywhere or nowhere there are "
                "the rules token and response"
            )
        if self.threshold is not None and self.threshold < 0 and not self.resolved:
            raise ValueError(
                f"threshold {self.threshold:g}: entropies are never negative, so each token would be a unit; take "
                "rule token for that, or a threshold of 0 or more"
            )
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(f"quantile {self.quantile} must lie between 0 and 1, such as 0.8")
        if self.target_length is not None and not 1 <= self.target_length < math.inf:
            raise ValueError(f"target_length {self.target_length} must be a mean number of tokens, at least 1")
        if self.n is not None and self.n < 1:
            raise ValueError(f"n {self.n} must be at least 1; None makes the whole response one unit")
        if not self.lengths or min(self.lengths) < 1 or self.repeats < 1:
            raise ValueError(f"lengths {self.lengths} and repeats {self.repeats} must be at least 1")
        for name in ("max_phrase_words", "max_code_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")

    @property
    def reads(self) -> set[str]:
        """What the rule reads: inputs of `segment` and names of settings."""
        return set(inspect.signature(_load(RULES[self.rule])).parameters) - {"mask"}

    @property
    def needs_model(self) -> bool:
        """Whether the rule reads the segmenter's entropies or log-probabilities."""
        return bool(self.reads & {"entropy", "logprobs"})

    @property
    def label(self) -> str:
        """The rule in a few characters, such as entropy>1.75 or ngram-5."""
        return self._label if self.compat is None else f"{self._label} as in {self.compat}"

    @property
    def _label(self) -> str:
        if self.rule != "entropy":
            sizes = {"ngram": self.n, "constituency": self.max_phrase_words, "python_ast": self.max_code_tokens}
            size = sizes.get(self.rule)
            return self.rule if size is None else f"{self.rule}-{size}"
        if self.threshold is not None:
            return f"entropy>{self.threshold:g}"
        if self.quantile is not None:
            return f"entropy>q{self.quantile:g}"
        return f"entropy~{self.target_length:g}-tokens"

    def resolve(self, entropy: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> "SegmentationConfig":
        """Find the threshold in nats on the segmenter's entropies over a data set; no change if it is there.

        A response's first token always opens a unit, so its entropy does not count.
        """
        if self.rule != "entropy" or self.threshold is not None:
            return self
        index = response_index(mask)
        values = full_precision(entropy)[mask & (index > 0)].sort().values
        if not len(values):
            raise ValueError("no response has a second token, so there is no entropy to take a threshold from")
        if self.target_length is None:
            assert self.quantile is not None
            at = self.quantile
        else:
            opened = mask.sum() / self.target_length - (mask & (index == 0)).sum()
            at = float(1 - opened / len(values))
            if at > 1:
                mean = float(mask.sum(1).float().mean())
                warnings.warn(
                    f"target_length {self.target_length:g}: missed, as responses have {mean:.1f} tokens on average and "
                    "each is one unit now; ask for less, or take rule response",
                    stacklevel=2,
                )
        place = min(max(at, 0.0), 1.0) * (len(values) - 1)
        low, high = values[math.floor(place)], values[math.ceil(place)]
        return replace(self, threshold=float(low + (high - low) * (place % 1)), resolved=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "lengths": list(self.lengths)}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "SegmentationConfig":
        """Undo `to_dict`."""
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown segmentation settings {', '.join(unknown)}: written by another version?")
        return cls(**{**settings, "lengths": tuple(settings.get("lengths", cls.lengths))})

    def software(self) -> dict[str, str]:
        """Name what else decides the cuts of a rule that reads text, with versions; {} for other rules.

        Raises:
            ValueError: it is not installed.
        """
        return _load("segrew.text_rules:software_of")(self) if "texts" in self.reads else {}

    def fingerprint(self, *, segmenter: str, tokenizer: str, read_position: str) -> str:
        """Identify where units end and are read: rewards of two different fingerprints do not compare.

        Covers the rule, the settings it reads, the tokenizer and the read position, and the segmenter where
        the rule reads its entropies or log-probabilities, or the splitter or parser where it reads text.
        """
        reads = self.reads
        settings = {name: value for name, value in self.to_dict().items() if name in reads} | self.software()
        if self.rule == "entropy" and self.threshold is None:
            raise ValueError("an entropy rule has a fingerprint once its threshold is known: call resolve first")
        identity = {"rule": self.rule, **settings, "tokenizer": tokenizer, "read_position": read_position}
        if reads & {"entropy", "logprobs"}:
            identity["segmenter"] = segmenter
        if self.compat is not None:
            identity["compat"] = self.compat
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def segment(
    config: SegmentationConfig,
    mask: Bool[Tensor, "b t"],
    *,
    entropy: Float[Tensor, "b t"] | None = None,
    logprobs: Float[Tensor, "b t"] | None = None,
    texts: Sequence[ResponseText] | None = None,
    ended: Bool[Tensor, " b"] | None = None,
    generator: torch.Generator | None = None,
) -> Segmentation:
    """Cut responses by a configured rule; no unit but a token begins inside a character.

    The stop token of rows that `ended` joins the unit before it. `compat` says where that is otherwise.

    Args:
        texts: of the responses. A rule of tensors can do without where every token is of whole characters.
    """
    inputs = {"entropy": entropy, "logprobs": logprobs, "texts": texts, "generator": generator}
    arguments = {name: inputs[name] if name in inputs else getattr(config, name) for name in config.reads}
    for name in arguments:
        if name in inputs and inputs[name] is None:
            raise ValueError(f"segmentation rule {config.rule!r} needs {name}; pass {name}=…")
    if config.rule == "entropy" and config.threshold is None:
        raise ValueError(f"{config.label} has no threshold in nats yet: call resolve on the segmenter's entropies")
    cut = _load(RULES[config.rule])(mask=mask, **arguments)
    if texts is not None and config.rule != "token" and config.compat is None and cut.size > 1:
        rows = [torch.tensor(text.continues, dtype=torch.bool) for text in texts]
        continues = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        cut = whole_characters(cut, pad(continues, (0, mask.shape[1] - continues.shape[1])))
    if ended is None:
        return cut
    released = config.compat == "dense_rlhf_release" and config.rule != "response"
    return leave_out_stop(cut, ended) if released else join_stop(cut, ended)
