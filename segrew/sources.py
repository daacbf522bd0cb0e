"""From data sets to items: rows read, converted and counted; parts by stage; mixtures by weight."""

import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from segrew.data_options import STAGES, DataOptions, Stage
from segrew.dataset_formats import FORMATS, Format, Row, Unusable, format_of, hub_set, trl_type
from segrew.records import records_of
from segrew.run_directory import DATA_FILE, read_json, write_json

T = TypeVar("T")


@dataclass
class Source:
    """One data set as it was read: rows seen, rows left out by reason, and how many items came of it."""

    name: str
    split: str
    kind: str = ""
    rows: int = 0
    used: int = 0
    skipped: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        left_out = "".join(f"\n    {count} left out: {reason}" for reason, count in self.skipped.most_common())
        return f"{self.used} from {self.name} ({self.kind}){left_out}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the run directory."""
        return vars(self) | {"skipped": dict(self.skipped)}


@dataclass(frozen=True)
class DataRecord:
    """What became of one role's data in a run: printed, and kept in `data.json`.

    Args:
        used: items, named `what`, that the run works on.
        fitted: how many were left out or cut to fit the maximum length, by reason.
    """

    role: str
    what: str
    used: int
    sources: list[Source]
    fitted: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [str(source) for source in self.sources] + [f"{n} {reason}" for reason, n in self.fitted.items()]
        return "\n  ".join([f"{self.role} {self.what}: {self.used}".capitalize(), *lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {self.what: self.used, "sources": [s.to_dict() for s in self.sources], "fitted": dict(self.fitted)}


def write_records(directory: Path, records: list[DataRecord]) -> None:
    """Write `data.json`, keeping what it already says of other roles."""
    path = directory / DATA_FILE
    before = read_json(path) if path.exists() else {}
    write_json(path, before | {record.role: record.to_dict() for record in records})


def prompt_key(messages: list[dict[str, Any]]) -> str:
    """Return what equal prompts have in common, whatever data set they come from: roles and stripped contents."""
    return json.dumps([[m["role"], str(m["content"] or "").strip()] for m in messages], ensure_ascii=False)


def stage_key(messages: list[dict[str, Any]]) -> str:
    """Return what decides a prompt's part of `--stage_split`: its first message but the system's.

    A longer conversation with the same opening, or the same question under other instructions, is in the same part.
    """
    return prompt_key([message for message in messages if message["role"] != "system"][:1] or messages)


def warn_of_shared_prompts(training: Iterable[str], held_out: Sequence[str], what: str) -> None:
    """Warn where held-out items, given by their prompts' keys, have a prompt that is trained on."""
    trained = set(training)
    shared = sum(key in trained for key in held_out)
    if shared:
        warnings.warn(
            f"{shared} of {len(held_out)} evaluation {what} have a prompt that is trained on too, so what is measured "
            "on them says little of new prompts; take these prompts out of the training set.",
            stacklevel=3,
        )


def stage_of(key: str, shares: tuple[float, ...]) -> Stage:
    """Return the part of `--stage_split` that a prompt belongs to, given its `stage_key`.

    It depends on a hash of the prompt alone, so no two parts share a prompt and the order of rows does not matter.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return STAGES[0] if place < shares[0] else STAGES[1] if place < shares[0] + shares[1] else STAGES[2]


def rows_of(source: Source, options: DataOptions) -> Iterator[tuple[str, Row, Format]]:
    """Yield the rows of a data set with their place and format, as the hub's well-known sets keep them."""
    known, hub = hub_set(source.name)
    split = hub.splits.get(source.split, source.split)
    reading = replace(options, dataset_config=options.dataset_config or hub.config)
    for where, record in records_of(source.name, split, reading, source.skipped):
        source.rows += 1
        yield where, record, format_of(record, options.dataset_format or known)


def _items(
    source: Source, options: DataOptions, convert: Callable[[Row, str], T], key_of: Callable[[T], str]
) -> Iterator[T]:
    """Yield what the rows of one data set become; count the others by reason."""
    shares = options.stage_shares
    for where, record, format_ in rows_of(source, options):
        source.kind = source.kind or (trl_type(record) if format_ is FORMATS["trl"] else format_.label)
        try:
            item = convert(format_.convert(record), where)
        except Unusable as reason:
            source.skipped[str(reason)] += 1
            continue
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{where}: not a row of {format_.label} ({type(error).__name__}: {error}).") from None
        if shares and options.stage and stage_of(key_of(item), shares) != options.stage:
            source.skipped["in another stage"] += 1
            continue
        yield item


def _quotas(weights: list[float], total: int) -> list[int]:
    """Share out `total` by weight; the largest remainders get what rounding leaves."""
    exact = [total * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])[: total - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _mixed(parts: list[list[T]], weights: list[float] | None, limit: int | None, seed: int) -> list[list[T]]:
    """Draw from each part its share of the largest mixture that holds nothing twice; all of it without weights."""
    weights = weights or [float(len(part)) for part in parts]
    largest = sum(weights) * min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    quotas = _quotas(weights, min(int(largest + 1e-9), limit or len(list(chain(*parts)))))
    generator = random.Random(seed)
    return [generator.sample(part, quota) for part, quota in zip(parts, quotas, strict=True)]


def _read(streams: list[Iterator[T]], options: DataOptions, limit: int | None) -> list[list[T]]:
    """Read as much of each data set as its place in the mixture can ask for."""
    if len(streams) == 1:
        return [list(islice(streams[0], limit))]
    if not options.streaming:
        return [list(stream) for stream in streams]
    assert options.dataset_weights is not None and limit is not None
    quotas = _quotas(options.dataset_weights, limit)
    return [list(islice(stream, quota)) for stream, quota in zip(streams, quotas, strict=True)]


def _check(options: DataOptions, sets: int, limit: int | None) -> None:
    weights = options.dataset_weights
    if weights is not None and len(weights) != sets:
        raise ValueError(f"--dataset_weights: {len(weights)} weights for {sets} data sets; give one each.")
    if options.streaming and limit is None:
        raise ValueError(
            "--streaming true: say how many rows to use at most (--max_pairs, --max_prompts or --max_rows); a command "
            "that has none of these reads whole sets."
        )
    if options.streaming and sets > 1 and weights is None:
        raise ValueError("--streaming true with several data sets: give each its share with --dataset_weights.")


def names_of(names: str | list[str]) -> list[str]:
    """Return one or several names as a list."""
    return [names] if isinstance(names, str) else names


def load(
    names: str | list[str],
    split: str,
    options: DataOptions,
    convert: Callable[[Row, str], T],
    key_of: Callable[[T], str],
    *,
    what: str,
    limit: int | None = None,
    seed: int = 0,
) -> tuple[list[T], list[Source]]:
    """Read one or several data sets and turn their rows into items.

    Of a single data set the first `limit` items are taken and no further row is read. Several are mixed by
    `--dataset_weights`, drawn without replacement and shuffled under the seed; while streaming, each gives the first
    items of its share.

    Args:
        convert: a row in TRL's columns, and its place, to an item; raises `Unusable` with a reason.
        key_of: an item's `stage_key`, or what stands for it.
        what: the items in words.

    Raises:
        ValueError: what is wrong, in which file and line; also when a data set gives no item.
    """
    names = names_of(names)
    _check(options, len(names), limit)
    sources = [Source(name, split) for name in names]
    parts = _read([_items(source, options, convert, key_of) for source in sources], options, limit)
    for source, part in zip(sources, parts, strict=True):
        if not part:
            reasons = ", ".join(f"{count} {reason}" for reason, count in source.skipped.items())
            raise ValueError(f"{source.name}: 0 of {source.rows} rows are usable {what} ({reasons}).")
    if len(parts) > 1:
        parts = _mixed(parts, options.dataset_weights, limit, seed)
    for source, part in zip(sources, parts, strict=True):
        source.used = len(part)
    items = list(chain(*parts))
    if len(parts) > 1:
        random.Random(seed).shuffle(items)
    return items, sources
