"""How long units are: a table over thresholds, and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from segrew.response_text import ResponseText
from segrew.segmentation import Segmentation, SegmentationConfig, segment

QUANTILES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975)


@dataclass(frozen=True)
class UnitLengths:
    """Lengths of the units that one rule makes, in tokens.

    Args:
        rule: with its threshold in nats, if it has one.
        mean, median, long: mean, median and 90 % quantile of the lengths.
        per_response: units of a response, on average.
    """

    rule: SegmentationConfig
    mean: float
    median: float
    long: float
    per_response: float

    @classmethod
    def of(cls, rule: SegmentationConfig, cut: Segmentation) -> "UnitLengths":
        """Measure a segmentation."""
        lengths = cut.lengths[cut.unit_mask].float()
        ordered = lengths.sort().values  # torch's own quantile takes no more than 2**24 numbers
        median, long = (float(ordered[int(share * (len(ordered) - 1))]) for share in (0.5, 0.9))
        return cls(rule, float(lengths.mean()), median, long, float(cut.counts.float().mean()))


def over_thresholds(
    entropy: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ended: Bool[Tensor, " b"],
    texts: Sequence[ResponseText] | None,
) -> list[UnitLengths]:
    """Cut responses by many quantiles of the same entropies."""
    measured = []
    for quantile in QUANTILES:
        rule = SegmentationConfig(quantile=quantile).resolve(entropy, mask)
        measured.append(UnitLengths.of(rule, segment(rule, mask, entropy=entropy, texts=texts, ended=ended)))
    return measured


def length_table(chosen: UnitLengths, others: Sequence[UnitLengths]) -> Table:
    """Lay out the chosen rule, and other thresholds from the same pass."""
    table = Table("rule", "nats", "mean", "median", "90 %", "units a response", title="Tokens a unit")
    for row in (chosen, *others):
        threshold = "" if row.rule.threshold is None else f"{row.rule.threshold:.3f}"
        name = chosen.rule.label if row is chosen else f"quantile {row.rule.quantile:g}"
        numbers = (f"{row.mean:.2f}", f"{row.median:.0f}", f"{row.long:.0f}", f"{row.per_response:.1f}")
        table.add_row(name, threshold, *numbers, end_section=row is chosen)
    return table


def plot_lengths(cut: Segmentation, chosen: UnitLengths, others: Sequence[UnitLengths], path: Path) -> None:
    """Draw how many units are how long, and beside it their length against the threshold."""
    figure = Figure(figsize=(9 if others else 5, 3.6), layout="constrained")
    left, *right = figure.subplots(1, 2 if others else 1, squeeze=False)[0]
    lengths = cut.lengths[cut.unit_mask].float().clamp(max=4 * chosen.long + 1)
    left.hist(lengths.numpy(), bins=int(lengths.max()), range=(0.5, float(lengths.max()) + 0.5))
    left.axvline(chosen.mean, color="black", lw=1, label=f"mean {chosen.mean:.2f}")
    left.set(xlabel="tokens a unit", ylabel="units", title=chosen.rule.label)
    left.legend()
    for axes in right:
        nats = [row.rule.threshold for row in others]
        for name, values in {
            "90 %": [row.long for row in others],
            "mean": [row.mean for row in others],
            "median": [row.median for row in others],
        }.items():
            axes.plot(nats, values, marker="o", ms=3, label=name)
        axes.axvline(chosen.rule.threshold, color="black", lw=1, label="chosen")
        axes.set(xlabel="entropy threshold (nats)", ylabel="tokens a unit", title="Other thresholds", yscale="log")
        axes.legend()
    figure.savefig(path)
