"""See what segrew keeps on disk, and clear it (`segrew cache`)."""

import shutil
import time
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Column, Table

from segrew.config import arg, parse
from segrew.embedded_model import EMBEDDED_MODEL, cache_directory, converted_model
from segrew.feature_cache import Entry, entries


@dataclass
class CacheConfig:
    """Which entries, and whether they go."""

    clear: bool = arg(False, help="Delete the entries that are listed; without it nothing is deleted.")
    model_name_or_path: str | None = arg(None, help="Only entries of models whose name holds this text.")
    older_than_days: float | None = arg(None, help="Only entries written longer ago than this.")
    embedded_model: bool = arg(False, help="With --clear: also the converted embedded model, made again when needed.")

    def __post_init__(self) -> None:
        if self.older_than_days is not None and self.older_than_days < 0:
            raise ValueError(f"--older_than_days {self.older_than_days}: must not be negative.")

    def chosen(self) -> list[Entry]:
        """The entries that the settings name."""
        newest = time.time() - 86400 * (self.older_than_days or 0)
        name = self.model_name_or_path or ""
        return [
            entry
            for entry in entries()
            if name in entry.model and (self.older_than_days is None or entry.written < newest)
        ]


def _table(listed: list[Entry]) -> Table:
    groups: dict[tuple[str, str, bool], list[Entry]] = {}
    for entry in listed:
        groups.setdefault((entry.model, entry.dtype, entry.has_states), []).append(entry)
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("entries", "responses", "MB")]
    kinds = [Column(name, no_wrap=True) for name in ("dtype", "states")]
    table = Table(Column("model", overflow="fold"), *kinds, *numbers, Column("written", min_width=13), box=box.SIMPLE)
    for (model, dtype, has_states), group in groups.items():
        days = sorted(time.strftime("%Y-%m-%d", time.localtime(entry.written)) for entry in group)
        table.add_row(
            model or "unknown",
            dtype,
            "yes" if has_states else "no",
            str(len(group)),
            str(sum(entry.rows for entry in group)),
            f"{sum(entry.size for entry in group) / 1e6:.1f}",
            days[0] if days[0] == days[-1] else f"{days[0]} to\n{days[-1]}",
        )
    return table


def main(argv: list[str]) -> None:
    """Run `segrew cache`."""
    (config,) = parse("cache", (CacheConfig,), argv)
    console, listed, model = Console(), config.chosen(), converted_model()
    if listed:
        console.print(f"Entropies of frozen models, some with hidden states, in {cache_directory()}", soft_wrap=True)
        console.print(_table(listed))
    else:
        console.print(f"No such entries in {cache_directory()}.")
    if model.exists():
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        console.print(f"{EMBEDDED_MODEL}, converted: {size / 1e6:.1f} MB in {model}")
    if not config.clear:
        return
    for entry in listed:
        entry.delete()
    console.print(f"{len(listed)} entries deleted, {sum(entry.size for entry in listed) / 1e6:.1f} MB.")
    if config.embedded_model and model.exists():
        shutil.rmtree(model)
        console.print(f"{model} deleted.")
