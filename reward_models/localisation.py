"""Where the reward lands: do marked faults get low segment rewards?"""

from collections.abc import Sequence
from dataclasses import dataclass

from reward_models.scored_responses import Segment
from segrew.metrics import wilson_interval
from segrew.preferences import Fault


@dataclass(frozen=True)
class Localisation:
    """How often a fault's segment is in the lowest third of its response.

    Args:
        share: of faults; chance: the same for a segment drawn at random; n: number of faults.
    """

    share: float
    chance: float
    ci95: tuple[float, float]
    n: int


def segment_of_fault(segments: Sequence[Segment], fault: Fault) -> int:
    """Return the segment that shares most characters with the fault."""
    return max(
        range(len(segments)), key=lambda k: min(segments[k].end, fault.end) - max(segments[k].start, fault.start)
    )


def in_lowest_third(segments: Sequence[Segment], index: int) -> bool:
    """Whether fewer than a third of the response's segments have a lower reward than this one."""
    values = [s.reward if s.normalized is None else s.normalized for s in segments]
    return 3 * sum(value < values[index] for value in values) < len(values)


def localisation(marked: Sequence[tuple[Sequence[Segment], Sequence[Fault]]]) -> Localisation:
    """Measure it over responses with marked faults; normalized rewards are used where there are any.

    Raises:
        ValueError: no response carries a marked fault.
    """
    hits, chances = [], []
    for segments, faults in marked:
        for fault in faults:
            hits.append(in_lowest_third(segments, segment_of_fault(segments, fault)))
            chances.append(-(-len(segments) // 3) / len(segments))
    if not hits:
        raise ValueError("no response carries a marked fault; the embedded pairs do (--dataset_name everyday).")
    low, high = wilson_interval(sum(hits), len(hits))
    return Localisation(sum(hits) / len(hits), sum(chances) / len(chances), (low, high), len(hits))
