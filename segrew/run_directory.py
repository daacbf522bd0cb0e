"""One directory per run: what was asked, with which versions, and what came of it."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
CARD_FILE = "segrew.json"  # makes a directory a reward model; see `reward_models.card`
DATA_FILE = "data.json"  # what was read of each data set, left out and cut, by reason
_VERSIONED = ("segrew", "torch", "transformers", "peft", "accelerate", "scikit-learn")


def versions() -> dict[str, str]:
    """Return the installed versions of segrew and of the libraries that decide a result."""
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader never sees half a file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: str | Path) -> Any:
    """Read JSON, or say which file is broken and where.

    Raises:
        ValueError: the file is missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from None


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write one JSON object a line, replacing the file in one step."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(partial, path)


def read_jsonl(path: str | Path) -> list[dict]:
    """Read the JSON lines that a run wrote; an unfinished last line, left by a kill, is passed over."""
    rows = []
    lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")  # splitlines() cuts at U+2028 as well
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not valid JSON.") from None
    return rows


def require_same_settings(before: dict[str, Any], now: dict[str, Any], where: str | Path) -> None:
    """Refuse to go on from what was made with other settings.

    Args:
        before: as a run wrote them down. now: those that matter.

    Raises:
        ValueError: naming each that differs, with both values.
    """
    now = json.loads(json.dumps(now))  # as it was written
    differing = [f"{k} {before.get(k)!r}, now {value!r}" for k, value in now.items() if before.get(k) != value]
    if differing:
        raise ValueError(
            f"{where} was made with other settings ({'; '.join(differing)}); go on with the same ones, name a new "
            "--output_dir, or replace the run with --overwrite_output_dir true."
        )


class RunDirectory:
    """A run's output directory, which never overwrites another run unless told to."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        command: str,
        config: dict[str, Any],
        overwrite: bool = False,
        resume: bool | None = None,
    ) -> "RunDirectory":
        """Claim `path` for a run and record its settings in `run.json`.

        Raises:
            ValueError: see `check`.
        """
        run = cls(path)
        used = run.check(command=command, config=config, overwrite=overwrite, resume=resume)
        if used and not resume:
            shutil.rmtree(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        if not (used and resume):
            started = time.strftime("%Y-%m-%dT%H:%M:%S")
            record = {"command": command, "config": config, "versions": versions(), "started": started}
            run.write_json(RUN_FILE, record)
        return run

    def check(
        self, *, command: str, config: dict[str, Any], overwrite: bool = False, resume: bool | None = None
    ) -> bool:
        """Return whether the directory holds a run, which the caller may then replace or continue.

        Args:
            resume: None where the command cannot continue a run.

        Long work calls this before it begins, and `create` with the same arguments when it has something to write.

        Raises:
            ValueError: it may not: the run is of another command, or holds what this one reads, or the files there
                were made by no run of segrew.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--output_dir {self.path} is a file; name a directory.")
        used = self.path.is_dir() and any(self.path.iterdir())
        if used and not (self.path / RUN_FILE).exists():
            raise ValueError(f"--output_dir {self.path} is not empty and holds no run; name a new directory.")
        if used and not (overwrite or resume):
            again = "" if resume is None else "resume it with --resume_from_checkpoint, "
            raise ValueError(
                f"--output_dir {self.path} already holds a run; name a new directory, {again}or replace it with "
                "--overwrite_output_dir true."
            )
        if used and resume and (before := read_json(self.path / RUN_FILE).get("command")) != command:
            raise ValueError(
                f"--output_dir {self.path} holds a run of `segrew {before}`; `segrew {command}` cannot resume it."
            )
        if used and not resume:
            self._refuse_inputs(config)
        return used

    @contextmanager
    def given_back_without(self, name: str) -> Iterator[None]:
        """Remove the directory again where the work inside fails before the file `name` has a line.

        Nothing is lost by it, and the next try finds the directory free.
        """
        try:
            yield
        except BaseException:
            path = self.path / name
            if not (path.exists() and path.stat().st_size) and not any(self.path.glob("checkpoint-*")):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _refuse_inputs(self, config: dict[str, Any]) -> None:
        """Refuse to delete what the run itself is to read."""
        for name, value in config.items():
            if name in ("output_dir", "run_name", "logging_dir"):
                continue
            for word in value if isinstance(value, list | tuple) else [value]:
                is_path = isinstance(word, str) and bool(word) and Path(word).exists()
                if is_path and Path(word).resolve().is_relative_to(self.path.resolve()):
                    raise ValueError(
                        f"--output_dir {self.path} holds --{name} {word}, which this run reads and "
                        "--overwrite_output_dir would delete; name another --output_dir."
                    )

    def write_json(self, name: str, content: Any) -> None:
        """Write `name` as JSON in one step."""
        write_json(self.path / name, content)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to `name`."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
