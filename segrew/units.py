"""The `Segmentation` record: which unit each response token belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad


class _once:
    """A property computed once. (`functools.cached_property` takes a lock, which `torch.compile` cannot trace.)"""

    def __init__(self, compute: Callable[["Segmentation"], Tensor]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, owner: "Segmentation | None", _: type | None = None) -> Any:
        if owner is None:
            return self
        value = self.compute(owner)
        # A tensor of a graph or of inference mode must not outlive it.
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            owner.__dict__[self.compute.__name__] = value
        return value


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Which unit each response token belongs to, for a batch of rows.

    Attributes:
        ids: unit of each token, 0, 1, … in order, −1 outside the response.
        bound: at least the units of the fullest row, vouched for by the caller. None checks `ids` and counts,
            which waits for the device once.
        fallback: rows that a parsing rule could not be applied to, where every token is a unit; None for a rule
            that always can.
    """

    ids: Int64[Tensor, "b t"]
    bound: int | None = None
    fallback: Bool[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        if self.bound is None:
            _check_ids(self.ids)
            object.__setattr__(self, "bound", max(1, int(self.ids.max()) + 1) if self.ids.numel() else 1)

    @property
    def size(self) -> int:
        """s, the number of unit columns."""
        assert self.bound is not None
        return self.bound

    @_once
    def mask(self) -> Bool[Tensor, "b t"]:
        """Real tokens."""
        return self.ids >= 0

    @_once
    def slots(self) -> Int64[Tensor, "b t"]:
        """`ids` as an index into units; padding points at unit 0."""
        return self.ids.clamp(min=0)

    @_once
    def first(self) -> Bool[Tensor, "b t"]:
        """Tokens that open a unit."""
        return self.mask & (self.ids != pad(self.ids, (1, 0), value=-1)[:, :-1])

    @_once
    def last(self) -> Bool[Tensor, "b t"]:
        """Tokens that close a unit."""
        return self.mask & (self.ids != pad(self.ids, (0, 1), value=-1)[:, 1:])

    @_once
    def lengths(self) -> Int64[Tensor, "b s"]:
        """Tokens of each unit."""
        zeros = self.ids.new_zeros(self.ids.shape[0], self.size)
        return zeros.scatter_add(1, self.slots, self.mask.to(torch.int64))

    @_once
    def counts(self) -> Int64[Tensor, " b"]:
        """Units of each row."""
        return self.unit_mask.sum(1)

    @_once
    def unit_mask(self) -> Bool[Tensor, "b s"]:
        """Real units."""
        return self.lengths > 0

    @_once
    def starts(self) -> Int64[Tensor, "b s"]:
        """Column of each unit's first token."""
        begins = self.mask & ~pad(self.mask, (1, 0))[:, :-1]
        offset = self._columns.where(begins, 0).sum(1, keepdim=True)
        return (offset + self.lengths.cumsum(1) - self.lengths).masked_fill(~self.unit_mask, 0)

    @_once
    def ends(self) -> Int64[Tensor, "b s"]:
        """Column of each unit's last token."""
        return (self.starts + self.lengths - 1).clamp(min=0)

    @_once
    def locations(self) -> Float[Tensor, "b s"]:
        """Relative place of each unit in its response, (k + 1) / count."""
        order = torch.arange(1, self.size + 1, device=self.ids.device)
        return (order / self.counts.clamp(min=1)[:, None]).masked_fill(~self.unit_mask, 0.0)

    @_once
    def token_locations(self) -> Float[Tensor, "b s"]:
        """Share of the response's tokens up to the end of each unit."""
        share = self.lengths.cumsum(1) / self.lengths.sum(1, keepdim=True).clamp(min=1)
        return share.masked_fill(~self.unit_mask, 0.0)

    @_once
    def positions(self) -> Int64[Tensor, "b t"]:
        """Place of each token in its unit, from 0."""
        return (self._columns - self._of_token(self.starts)).masked_fill(~self.mask, 0)

    @_once
    def unit_lengths(self) -> Int64[Tensor, "b t"]:
        """Length of each token's unit."""
        return self._of_token(self.lengths)

    def select(self, rows: Int64[Tensor, " r"]) -> "Segmentation":
        """Take some rows."""
        return Segmentation(self.ids[rows], self.bound, None if self.fallback is None else self.fallback[rows])

    def to(self, device: torch.device | str) -> "Segmentation":
        """Move to a device."""
        return Segmentation(
            self.ids.to(device), self.bound, None if self.fallback is None else self.fallback.to(device)
        )

    @staticmethod
    def joined(parts: list["Segmentation"]) -> "Segmentation":
        """Lay the rows of several batches one after the other."""
        width = max(part.ids.shape[1] for part in parts)
        ids = torch.cat([pad(part.ids, (0, width - part.ids.shape[1]), value=-1) for part in parts])
        fallbacks = [part.fallback for part in parts if part.fallback is not None]
        return Segmentation(ids, max(part.size for part in parts), torch.cat(fallbacks) if fallbacks else None)

    @_once
    def _columns(self) -> Int64[Tensor, "1 t"]:
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None]

    def _of_token(self, x: Int64[Tensor, "b s"]) -> Int64[Tensor, "b t"]:
        return x.gather(1, self.slots).masked_fill(~self.mask, 0)


def partition(opens: Bool[Tensor, "b t"], mask: Bool[Tensor, "b t"], bound: int | None = None) -> Segmentation:
    """Number the units that begin at `opens` and at each response's first token.

    `bound` limits their number where counting would wait for the device; None stands for one unit per token.
    """
    begins = mask & ~pad(mask, (1, 0))[:, :-1]
    ids = ((opens | begins) & mask).cumsum(1).sub_(1).masked_fill_(~mask, -1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        _refuse(begins.sum(1) > 1, "has a hole in its mask")
        bound = int(ids.max()) + 1 if ids.numel() else 1
    elif bound is None:
        bound = mask.shape[1]
    return Segmentation(ids, bound=max(1, bound))


def response_index(mask: Bool[Tensor, "b t"]) -> Int64[Tensor, "b t"]:
    """Place of each token in its response, from 0."""
    return mask.cumsum(1) - 1


def _check_ids(ids: Tensor) -> None:
    real = ids >= 0
    begins = real & ~pad(real, (1, 0))[:, :-1]
    both, step = real[:, :-1] & real[:, 1:], ids.diff()
    _refuse(begins.sum(1) > 1, "has a hole in its mask")
    _refuse((begins & (ids != 0)).any(1), "does not begin with unit 0")
    _refuse((both & (step != 0) & (step != 1)).any(1), "has units out of order")
    _refuse((ids < -1).any(1), "has an id below -1")


def _refuse(rows: Bool[Tensor, " b"], fault: str) -> None:
    if rows.any():
        raise ValueError(
            f"segmentation row {int(rows.nonzero()[0])} {fault}: a response is one run of real tokens whose units "
            "count up from 0, and -1 everywhere else"
        )
