"""Where units end: the `Segmentation` record, one plug-in table of rules, and what a stop token does to it.

A unit is a run of response tokens: a segment when rewards are read, a macro action when advantages are
computed. Every rule partitions the response and knows no stop token; `join_stop` comes after it.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn.functional import pad

from segrew.masking import full_precision
from segrew.units import Segmentation, partition, response_index

Rule = Literal["entropy", "token", "response", "ngram", "random_ngram", "perplexity"]
WhenExhausted = Literal["remainder", "reshuffle"]
ReadPosition = Literal["end", "content"]
Compat = Literal["dense_rlhf_release"]


def segment_by_entropy(
    entropy: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, threshold: float | int
) -> Segmentation:
    """Token y_j opens a unit iff H_j > threshold, with H_j the entropy that produced it (2501.02790, 3.2)."""
    return partition(full_precision(entropy) > threshold, mask)


def segment_by_token(mask: Bool[Tensor, "b t"]) -> Segmentation:
    """Every token is a unit."""
    return partition(mask, mask)


def segment_by_response(mask: Bool[Tensor, "b t"]) -> Segmentation:
    """The whole response is one unit."""
    return partition(torch.zeros_like(mask), mask, bound=1)


def segment_by_ngram(mask: Bool[Tensor, "b t"], n: int | Int[Tensor, " b"] | None) -> Segmentation:
    """Every n tokens are a unit, the last one may be shorter; None takes the whole response."""
    if n is None:
        return segment_by_response(mask)
    if isinstance(n, Tensor):
        return partition(response_index(mask) % n.clamp(min=1)[:, None] == 0, mask)
    if n < 1:
        raise ValueError(f"n {n} must be at least 1; None makes the whole response one unit")
    return partition(response_index(mask) % n == 0, mask, bound=-(-mask.shape[1] // n))


def segment_by_random_ngram(
    mask: Bool[Tensor, "b t"],
    *,
    lengths: Sequence[int] = (2, 3, 5, 10),
    repeats: int = 3,
    when_exhausted: WhenExhausted = "remainder",
    generator: torch.Generator,
) -> Segmentation:
    """Unit lengths are `lengths` × `repeats` in a random order of each row's own (2410.02743, appendix B.4).

    When they are used up, `remainder` makes the rest one unit and `reshuffle` deals the lengths again.
    """
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise ValueError(f"lengths {tuple(lengths)} and repeats {repeats} must be at least 1")
    rows, width = mask.shape
    deck = torch.tensor(tuple(lengths) * repeats)
    rounds = 1 if when_exhausted == "remainder" else max(1, -(-width // (sum(lengths) * repeats)))
    # Rounds come first, so that a wider batch draws the same numbers for its first rounds.
    draws = torch.rand(rounds, rows, len(deck), generator=generator, device=generator.device)
    return _segment_by_deal(deck.to(mask.device), draws.to(mask.device), mask)


def _segment_by_deal(deck: Tensor, draws: Tensor, mask: Tensor) -> Segmentation:
    dealt = deck[draws.argsort(-1)].transpose(0, 1).flatten(1)
    unit = torch.searchsorted(dealt.cumsum(1), response_index(mask), right=True)
    return partition(unit != pad(unit, (1, 0))[:, :-1], mask)


def segment_by_perplexity(logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Segmentation:
    """Token y_j opens a unit iff its NLL exceeds the mean NLL of the running unit (2410.02743, 3.2)."""
    # In float64 sums of float32 values are exact, so equal NLLs never look like a rise.
    wide = torch.float32 if logprobs.device.type == "mps" else torch.float64
    nll = -logprobs.to(wide).masked_fill(~mask, 0.0)
    total, count = nll.new_zeros(len(nll)), nll.new_zeros(len(nll))
    opens = torch.zeros_like(mask)
    for column in range(mask.shape[1]):
        now, real = nll[:, column], mask[:, column]
        opened = now * count > total
        total = torch.where(opened, now, total + now)
        count = torch.where(opened, 1.0, count + real)
        opens[:, column] = opened
    return partition(opens, mask)


def segment_by_boundaries(opens: Bool[Tensor, "b t"] | Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Segmentation:
    """Token y_j opens a unit iff opens[j], or its probability of doing so is above 0.5."""
    return partition(opens if opens.dtype == torch.bool else opens > 0.5, mask)


def segment_by_spans(spans: Sequence[Sequence[tuple[int, int]]], mask: Bool[Tensor, "b t"]) -> Segmentation:
    """Each span (start, end) of response tokens, end exclusive, opens a unit at its start.

    Offsets count from the response's first token. Tokens between spans join the unit before them.
    """
    if len(spans) != mask.shape[0]:
        raise ValueError(f"{len(spans)} rows of spans for {mask.shape[0]} rows of tokens")
    for row, (of_row, length) in enumerate(zip(spans, mask.sum(1).tolist(), strict=True)):
        edges = [0, *(offset for span in of_row for offset in span), length]
        if edges != sorted(edges) or any(start == end for start, end in of_row):
            raise ValueError(f"spans of row {row} must be non-empty, rising and within its {length} tokens")
    cells = [(row, start) for row, of_row in enumerate(spans) for start, _ in of_row]
    opens = torch.zeros(mask.shape, dtype=torch.bool)
    if cells:
        opens[tuple(torch.tensor(cells).T)] = True
    return partition(opens.to(mask.device).gather(1, response_index(mask).clamp(min=0)), mask)


def join_stop(segmentation: Segmentation, ended: Bool[Tensor, " b"]) -> Segmentation:
    """Merge the stop token of rows that `ended` into the unit before it; a one-token row keeps it."""
    final = segmentation.ids == segmentation.counts[:, None] - 1
    alone = ended & (final.sum(1) == 1) & (segmentation.counts > 1)
    return Segmentation(segmentation.ids - (final & alone[:, None]).long(), bound=segmentation.size)


def leave_out_stop(segmentation: Segmentation, ended: Bool[Tensor, " b"]) -> Segmentation:
    """Take the stop token of rows that `ended` out of every unit, as the code of 2501.02790 does.

    A row of the stop token alone keeps it: there the released code wraps around to the last column.
    """
    mask = segmentation.mask
    final = mask & ~pad(mask, (0, 1))[:, 1:]
    leaves = ended & (mask.sum(1) > 1)
    return Segmentation(segmentation.ids.masked_fill(final & leaves[:, None], -1), bound=segmentation.size)


def read_columns(
    segmentation: Segmentation, ended: Bool[Tensor, " b"], read_position: ReadPosition = "end"
) -> Int64[Tensor, "b s"]:
    """Column each unit is read at: its last token, or with `content` the token before the stop token.

    Only the last unit of a row that `ended` holds a stop token; a unit of one token is read at it.
    """
    if read_position == "end":
        return segmentation.ends
    order = torch.arange(segmentation.size, device=segmentation.ids.device)
    holds_stop = ended[:, None] & (order == segmentation.counts[:, None] - 1)
    return segmentation.ends - (holds_stop & (segmentation.lengths > 1)).long()


# A rule reads what its parameters name: `mask`, an input of `segment` or a field of `SegmentationConfig`.
RULES: dict[str, Callable[..., Segmentation]] = {
    "entropy": segment_by_entropy,
    "token": segment_by_token,
    "response": segment_by_response,
    "ngram": segment_by_ngram,
    "random_ngram": segment_by_random_ngram,
    "perplexity": segment_by_perplexity,
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
        compat: dense_rlhf_release leaves the stop token out of every unit, as the code of 2501.02790 does, but for
            rule response. Its token level is threshold 0.
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
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(f"quantile {self.quantile} must lie between 0 and 1, such as 0.8")
        if self.target_length is not None and not 1 <= self.target_length < math.inf:
            raise ValueError(f"target_length {self.target_length} must be a mean number of tokens, at least 1")
        if self.n is not None and self.n < 1:
            raise ValueError(f"n {self.n} must be at least 1; None makes the whole response one unit")
        if not self.lengths or min(self.lengths) < 1 or self.repeats < 1:
            raise ValueError(f"lengths {self.lengths} and repeats {self.repeats} must be at least 1")

    @property
    def needs_model(self) -> bool:
        """Whether the rule reads the segmenter's entropies or log-probabilities."""
        return bool(_reads(self.rule) & {"entropy", "logprobs"})

    @property
    def label(self) -> str:
        """The rule in a few characters, such as entropy>1.75 or ngram-5."""
        return self._label if self.compat is None else f"{self._label} as in {self.compat}"

    @property
    def _label(self) -> str:
        if self.rule == "ngram":
            return "ngram" if self.n is None else f"ngram-{self.n}"
        if self.rule != "entropy":
            return self.rule
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

    def fingerprint(self, *, segmenter: str, tokenizer: str, read_position: str) -> str:
        """Identify where units end and are read: rewards of two different fingerprints do not compare.

        Covers the rule, the settings it reads, the tokenizer and the read position, and the segmenter where
        the rule reads its entropies or log-probabilities.
        """
        reads = _reads(self.rule)
        settings = {name: value for name, value in self.to_dict().items() if name in reads}
        if self.rule == "entropy" and self.threshold is None:
            raise ValueError("an entropy rule has a fingerprint once its threshold is known: call resolve first")
        identity = {"rule": self.rule, **settings, "tokenizer": tokenizer, "read_position": read_position}
        if reads & {"entropy", "logprobs"}:
            identity["segmenter"] = segmenter
        if self.compat is not None:
            identity["compat"] = self.compat
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _reads(rule: str) -> set[str]:
    return set(inspect.signature(RULES[rule]).parameters) - {"mask"}


def segment(
    config: SegmentationConfig,
    mask: Bool[Tensor, "b t"],
    *,
    entropy: Float[Tensor, "b t"] | None = None,
    logprobs: Float[Tensor, "b t"] | None = None,
    ended: Bool[Tensor, " b"] | None = None,
    generator: torch.Generator | None = None,
) -> Segmentation:
    """Cut responses by a configured rule; the stop token of rows that `ended` joins the unit before it.

    With `compat` it is in no unit, unless the whole response is one.
    """
    inputs = {"entropy": entropy, "logprobs": logprobs, "generator": generator}
    arguments = {name: inputs[name] if name in inputs else getattr(config, name) for name in _reads(config.rule)}
    for name in arguments:
        if name in inputs and inputs[name] is None:
            raise ValueError(f"segmentation rule {config.rule!r} needs {name}; pass {name}=…")
    if config.rule == "entropy" and config.threshold is None:
        raise ValueError(f"{config.label} has no threshold in nats yet: call resolve on the segmenter's entropies")
    cut = RULES[config.rule](mask=mask, **arguments)
    if ended is None:
        return cut
    released = config.compat == "dense_rlhf_release" and config.rule != "response"
    return leave_out_stop(cut, ended) if released else join_stop(cut, ended)
