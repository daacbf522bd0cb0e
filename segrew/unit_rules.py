"""Rules that cut responses into units from masks, entropies and log-probabilities, and what is done to their cuts."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn.functional import pad

from segrew.masking import full_precision
from segrew.units import Segmentation, partition, response_index

WhenExhausted = Literal["remainder", "reshuffle"]
ReadPosition = Literal["end", "content"]


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


def whole_characters(segmentation: Segmentation, continues: Bool[Tensor, "b t"]) -> Segmentation:
    """Move units that begin inside a character to the first token behind it.

    Args:
        continues: whether a token begins inside a character, from column 0 on, whatever the mask's padding.
    """
    mask = segmentation.mask
    index = response_index(mask)
    inside = continues.to(mask.device).gather(1, index.clamp(min=0)) & (index > 0)
    columns = torch.arange(mask.shape[1], device=mask.device)
    owner = columns.where(~inside, 0).cummax(1).values  # the token that began each token's character
    unit = segmentation.ids.gather(1, owner)
    cut = partition(unit != pad(unit, (1, 0))[:, :-1], mask)
    return Segmentation(cut.ids, cut.bound, segmentation.fallback)


def join_stop(segmentation: Segmentation, ended: Bool[Tensor, " b"]) -> Segmentation:
    """Merge the stop token of rows that `ended` into the unit before it; a one-token row keeps it."""
    final = segmentation.ids == segmentation.counts[:, None] - 1
    alone = ended & (final.sum(1) == 1) & (segmentation.counts > 1)
    ids = segmentation.ids - (final & alone[:, None]).long()
    return Segmentation(ids, segmentation.size, segmentation.fallback)


def leave_out_stop(segmentation: Segmentation, ended: Bool[Tensor, " b"]) -> Segmentation:
    """Take the stop token of rows that `ended` out of every unit, as the code of 2501.02790 does.

    A row of the stop token alone keeps it: there the released code wraps around to the last column.
    """
    mask = segmentation.mask
    final = mask & ~pad(mask, (0, 1))[:, 1:]
    leaves = ended & (mask.sum(1) > 1)
    ids = segmentation.ids.masked_fill(final & leaves[:, None], -1)
    return Segmentation(ids, segmentation.size, segmentation.fallback)


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
