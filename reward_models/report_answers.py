"""From scored responses to coloured text: which characters, which colour, where the marked faults are."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reward_models.charts import number
from reward_models.report_runs import finite, records

LEVELS = 4  # colour steps on either side of neutral, half a standard deviation each


@dataclass(frozen=True)
class Piece:
    """A run of characters of one segment, wholly inside or wholly outside a marked fault."""

    text: str
    fault: str | None


@dataclass(frozen=True)
class Span:
    """One segment as it is drawn: level -4 .. 4, what it says when pointed at; None: text in no segment."""

    pieces: list[Piece]
    level: int | None
    value: str
    says: str


@dataclass(frozen=True)
class Answer:
    """A response ready for the page."""

    identity: str
    prompt: str
    earlier: int
    spans: list[Span]
    score: float | None
    side: str | None
    verdicts: list[str]
    step: float | None
    segments: int
    tokens: int
    length: int


@dataclass(frozen=True)
class RewardScale:
    """How a segment's number becomes a colour: normalized rewards as they are, raw ones standardized here."""

    normalized: bool
    centre: float
    spread: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "RewardScale":
        """Take normalized rewards where every segment has one, else the raw ones with their mean and spread."""
        segments = [segment for row in rows for segment in segments_of(row)]
        if segments and all(finite(segment.get("normalized")) is not None for segment in segments):
            return cls(normalized=True, centre=0.0, spread=1.0)
        raw = [value for s in segments if (value := finite(s.get("reward"))) is not None]
        centre = sum(raw) / len(raw) if raw else 0.0
        spread = math.sqrt(sum((value - centre) ** 2 for value in raw) / len(raw)) if raw else 0.0
        return cls(normalized=False, centre=centre, spread=spread or 1.0)

    def of_segment(self, segment: Mapping[str, Any]) -> float | None:
        """In standard deviations from the typical; None where the file has no number."""
        value = finite(segment.get("normalized" if self.normalized else "reward"))
        return None if value is None else (value - self.centre) / self.spread


def segments_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The segments of a row; anything else that the field may hold is passed over."""
    return records(row.get("segments"))


def tokens_of(row: Mapping[str, Any]) -> int:
    """Tokens of the response, all segments together; 0 where the file does not say."""
    return int(sum(finite(segment.get("tokens")) or 0 for segment in segments_of(row)))


def faults_of(row: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Marked faults as (start, end, kind), those that are no span left out."""
    spans = []
    for fault in records(row.get("faults")):
        start, end = _offsets(fault)
        if start < end:
            spans.append((start, end, str(fault.get("kind") or "fault").replace("_", " ")))
    return spans


def answer_view(row: Mapping[str, Any], scale: RewardScale) -> Answer:
    """Cut one response at the edges of segments and faults and give each segment its colour."""
    text, faults = str(row.get("response") or ""), faults_of(row)
    turns = records(row.get("prompt"))
    spans, position = [], 0
    placed = _place(segments_of(row), text)
    for start, end, segment in placed:
        if start > position:
            spans.append(Span(_pieces(text, position, start, faults), None, "", ""))
        z = scale.of_segment(segment)
        says = ", ".join(
            f"{name} {number(value)}"
            for name in ("reward", "normalized", "location", "tokens")
            if (value := finite(segment.get(name))) is not None
        )
        spans.append(Span(_pieces(text, start, end, faults), _level(z), _signed(z), says))
        position = end
    if position < len(text):
        spans.append(Span(_pieces(text, position, len(text), faults), None, "", ""))
    return Answer(
        identity=str(row.get("id", "")),
        prompt=str(turns[-1].get("content", "")) if turns else str(row.get("prompt") or ""),
        earlier=max(0, len(turns) - 1),
        spans=spans,
        score=finite(row.get("score")),
        side=row.get("side") if row.get("side") in ("chosen", "rejected") else None,
        verdicts=_verdicts(placed, faults, scale),
        step=finite(row.get("step")),
        segments=len(placed),
        tokens=tokens_of(row),
        length=len(text),
    )


def fault_contrast(rows: Sequence[Mapping[str, Any]], scale: RewardScale) -> dict[str, int | float] | None:
    """Mean reward, in the scale's units, of segments that touch a marked fault and of the others beside them."""
    inside: list[float] = []
    outside: list[float] = []
    for row in rows:
        faults = faults_of(row)
        for start, end, segment in _place(segments_of(row), str(row.get("response") or "")) if faults else []:
            z = scale.of_segment(segment)
            if z is not None:
                hit = any(_overlap(start, end, fault) > 0 for fault in faults)
                (inside if hit else outside).append(z)
    if not inside or not outside:
        return None
    return {
        "faulty": sum(inside) / len(inside),
        "other": sum(outside) / len(outside),
        "faulty_n": len(inside),
        "other_n": len(outside),
    }


def _verdicts(
    placed: list[tuple[int, int, Mapping[str, Any]]], faults: list[tuple[int, int, str]], scale: RewardScale
) -> list[str]:
    """For each fault: how low the reward of the segment that holds most of it is among all segments."""
    scored = [(start, end, z) for start, end, s in placed if (z := scale.of_segment(s)) is not None]
    said = []
    for fault in faults:
        if not any(_overlap(start, end, fault) > 0 for start, end, _ in scored):
            continue
        z = max(scored, key=lambda place: _overlap(place[0], place[1], fault))[2]
        rank = 1 + sum(other < z for *_, other in scored)
        if len(scored) == 1:
            said.append(f"{fault[2]}: the answer is one segment")
            continue
        place = {len(scored): "the highest", 1: "the lowest"}.get(rank, f"the {_ordinal(rank)} lowest")
        said.append(f"{fault[2]}: its segment has {place} reward of {len(scored)}")
    return [one if times == 1 else f"{times} × {one}" for one, times in Counter(said).items()]


def _place(segments: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int, Mapping[str, Any]]]:
    """Segments with their character range in the text, in order and without overlap."""
    placed, position = [], 0
    for segment in segments:
        start, end = _offsets(segment)
        if not start < end:  # no offsets in the file: its text says where it is
            content = str(segment.get("text") or "")
            start = text.find(content, position) if content else -1
            end = start + len(content)
        start, end = max(start, position), min(end, len(text))
        if start < end:
            placed.append((start, end, segment))
            position = end
    return placed


def _pieces(text: str, start: int, end: int, faults: list[tuple[int, int, str]]) -> list[Piece]:
    cuts = {start, end, *(edge for fault in faults for edge in fault[:2] if start < edge < end)}
    edges = sorted(cuts)
    pieces = []
    for left, right in pairwise(edges):
        kinds = [fault[2] for fault in faults if _overlap(left, right, fault) > 0]
        pieces.append(Piece(text[left:right], ", ".join(kinds) or None))
    return pieces


def _overlap(start: int, end: int, fault: tuple[int, int, str]) -> int:
    return min(end, fault[1]) - max(start, fault[0])


def _offsets(record: Mapping[str, Any]) -> tuple[int, int]:
    start, end = record.get("start"), record.get("end")
    return (start, end) if isinstance(start, int) and isinstance(end, int) and start >= 0 else (0, 0)


def _level(z: float | None) -> int | None:
    return None if z is None else max(-LEVELS, min(LEVELS, round(z * LEVELS / 2)))


def _signed(z: float | None) -> str:
    return "" if z is None else f"{round(z, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0 turns -0.0 into 0.0


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
