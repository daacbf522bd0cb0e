"""The `Segmentation` record: which unit each response token belongs to."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Which unit each response token belongs to, for a batch of rows.

    Attributes:
        ids: unit of each token, 0, 1, … in order, −1 outside the response.
        bound: at least the units of the fullest row, vouched for by the caller. None checks `ids` and counts,
            which waits for the device once.
    """

    ids: Int64[Tensor, "b t"]
    bound: int | None = None

    def __post_init__(self) -> None:
        if self.bound is None:
            _check_ids(self.ids)
            object.__setattr__(self, "bound", max(1, int(self.ids.max()) + 1) if self.ids.numel() else 1)

    @property
    def size(self) -> int:
        """s, the number of unit columns."""
        assert self.bound is not None
        return self.bound

    @property
    def mask(self) -> Bool[Tensor, "b t"]:
        """Real tokens."""
        return self.ids >= 0

    @property
    def first(self) -> Bool[Tensor, "b t"]:
        """Tokens that open a unit."""
        return self.mask & (self.ids != pad(self.ids, (1, 0), value=-1)[:, :-1])

    @property
    def last(self) -> Bool[Tensor, "b t"]:
        """Tokens that close a unit."""
        return self.mask & (self.ids != pad(self.ids, (0, 1), value=-1)[:, 1:])

    @property
    def counts(self) -> Int64[Tensor, " b"]:
        """Units of each row."""
        return self.first.sum(1)

    @property
    def unit_mask(self) -> Bool[Tensor, "b s"]:
        """Real units."""
        return torch.arange(self.size, device=self.ids.device) < self.counts[:, None]

    @property
    def lengths(self) -> Int64[Tensor, "b s"]:
        """Tokens of each unit."""
        return self._sum(self.mask)

    @property
    def starts(self) -> Int64[Tensor, "b s"]:
        """Column of each unit's first token."""
        return self._sum(self.first * self._columns)

    @property
    def ends(self) -> Int64[Tensor, "b s"]:
        """Column of each unit's last token."""
        return self._sum(self.last * self._columns)

    @property
    def locations(self) -> Float[Tensor, "b s"]:
        """Relative place of each unit in its response, (k + 1) / count."""
        order = torch.arange(1, self.size + 1, device=self.ids.device)
        return (order / self.counts.clamp(min=1)[:, None]).masked_fill(~self.unit_mask, 0.0)

    @property
    def positions(self) -> Int64[Tensor, "b t"]:
        """Place of each token in its unit, from 0."""
        return (self._columns - self._of_token(self.starts)).masked_fill(~self.mask, 0)

    @property
    def unit_lengths(self) -> Int64[Tensor, "b t"]:
        """Length of each token's unit."""
        return self._of_token(self.lengths)

    def select(self, rows: Int64[Tensor, " r"]) -> "Segmentation":
        """Take some rows."""
        return Segmentation(self.ids[rows], bound=self.bound)

    def to(self, device: torch.device | str) -> "Segmentation":
        """Move to a device."""
        return Segmentation(self.ids.to(device), bound=self.bound)

    @property
    def _columns(self) -> Int64[Tensor, "1 t"]:
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None]

    def _sum(self, x: Tensor) -> Int64[Tensor, "b s"]:
        sums = self.ids.new_zeros(self.ids.shape[0], self.size)
        return sums.scatter_add(1, self.ids.clamp(min=0), x.to(torch.int64))

    def _of_token(self, x: Int64[Tensor, "b s"]) -> Int64[Tensor, "b t"]:
        return x.gather(1, self.ids.clamp(min=0)).masked_fill(~self.mask, 0)


def _check_ids(ids: Tensor) -> None:
    real = ids >= 0
    before, after = ids[:, :-1], ids[:, 1:]
    both = real[:, :-1] & real[:, 1:]
    opened = real & ~pad(real, (1, 0))[:, :-1]
    faults = {
        "has a hole in its mask": opened.sum(1) > 1,
        "does not begin with unit 0": (opened & (ids != 0)).any(1),
        "has units out of order": (both & (after != before) & (after != before + 1)).any(1),
        "has an id below -1": (ids < -1).any(1),
    }
    for fault, rows in faults.items():
        if rows.any():
            raise ValueError(
                f"segmentation row {int(rows.nonzero()[0])} {fault}: a response is one run of real tokens "
                "whose units count up from 0, and -1 everywhere else"
            )


def partition(opens: Tensor, mask: Tensor, bound: int | None = None) -> Segmentation:
    """Number the units; `bound` limits their count where counting would wait for the device."""
    index = response_index(mask)
    ids = torch.where(mask, ((opens & mask) | (mask & (index == 0))).cumsum(1) - 1, -1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        return Segmentation(ids)
    return Segmentation(ids, bound=max(1, mask.shape[1] if bound is None else bound))


def response_index(mask: Bool[Tensor, "b t"]) -> Int64[Tensor, "b t"]:
    """Place of each token in its response, from 0."""
    return mask.cumsum(1) - 1
