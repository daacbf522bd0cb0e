"""Typed configuration: one dataclass field is one flag, one YAML key and one line of help.

A YAML file is read as if its keys had been typed before the flags, so every value goes through the same
parser, flags win over the file, and `1e-5` is a number in both.
"""

import argparse
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

_COUNTS = ("batch_size", "tokens_per_batch", "max_pairs", "max_prompts", "max_rows", "max_per_subset")  # at least 1


def arg(default: Any = dataclasses.MISSING, *, help: str, **metadata: Any) -> Any:
    """Declare a configuration field: its default and the text that `--help` shows."""
    metadata = {"help": help.replace("%", "%%"), **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, where PyYAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: the key '{key}' is given twice; keep one.")
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str | Path, flag: str = "--config") -> dict[str, Any]:
    """Read a flat YAML mapping.

    Args:
        flag: that names the file, for messages.

    Raises:
        ValueError: the file cannot be read, is not YAML, not a mapping, or repeats a key.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise ValueError(f"{flag} {path}: no such file.") from None
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error.strerror}); name a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{flag} {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{flag} {path}: expected `name: value` lines, found {type(content).__name__}.")
    return {str(name): value for name, value in content.items()}


def _as_flags(settings: dict[str, Any]) -> list[str]:
    """Spell a mapping as the flags that say the same."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:  # one word, so that a value may begin with a minus sign
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _split_config_flag(argv: list[str]) -> tuple[str | None, list[str]]:
    for i, word in enumerate(argv):
        if word == "--config":
            if i + 1 == len(argv):
                raise ValueError("--config needs a file name after it.")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if word.startswith("--config="):
            return word.split("=", 1)[1], argv[:i] + argv[i + 1 :]
    return None, argv


def _check_numbers(configs: tuple) -> None:
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{field.name} {value}: must be a finite number.")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and field.name.endswith("learning_rate") and value < 0:
                raise ValueError(f"--{field.name} {value}: must not be negative.")
            if number and field.name in ("seed", "data_seed") and not 0 <= value < 2**32:
                raise ValueError(f"--{field.name} {value}: must be at least 0 and below 2**32, as numpy wants it.")
            if number and field.name.endswith(_COUNTS) and value < 1:
                raise ValueError(f"--{field.name} {value}: must be at least 1.")


def _without_nulls(flags: list[str], settings: dict[str, Any]) -> list[str]:
    """Move `--name null` from the flags to the file's settings, where null is a value of its own."""
    kept: list[str] = []
    for word in flags:
        if word == "null" and kept and kept[-1].startswith("--"):
            settings[kept.pop()[2:]] = None
        else:
            kept.append(word)
    return kept


def _turned_off(settings: dict[str, Any], classes: tuple[Any, ...]) -> dict[str, None]:
    """Return the settings that are null, if null is one of their values."""
    hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    off = [name.replace("-", "_") for name, value in settings.items() if value is None]
    for name in off:
        if type(None) not in get_args(hints.get(name)):
            raise ValueError(f"--{name} null: this setting needs a value; leave it out for its default.")
    return dict.fromkeys(off)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """One name for each flag with the kind of its value; choices and a default as words of its help."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        kinds = {"int": "N", "float": "X", "string_to_bool": "true|false"}
        kind = kinds.get(getattr(action.type, "__name__", ""), "NAME")
        return f"{action.option_strings[0]} {kind}" + " …" * (action.nargs in ("+", "*"))

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.choices:
            text += f" ({', '.join(map(str, action.choices))})"
        if default in (None, "", [], argparse.SUPPRESS):
            return text
        words = default if isinstance(default, list) else [str(default).lower() if action.nargs == "?" else default]
        return f"{text} [" + " ".join(map(str, words)).replace("%", "%%") + "]"


def _headings(cls: Any) -> dict[str, list[str]]:
    """Names of a dataclass's fields under the headings of its help: its own first, then those of its bases.

    A class with `HEADINGS` (first field of a section: heading) has them in that order; another one's is its docstring.
    """
    sections: dict[str, list[str]] = {}
    known, seen = {field.name for field in dataclasses.fields(cls)}, set[str]()
    for owner in cls.__mro__:
        headings = vars(owner).get("HEADINGS", {})
        sections |= {heading: [] for heading in headings.values()}
        heading = re.split(r"[;:]|\.(?:\s|$)", (owner.__doc__ or owner.__name__).strip())[0]
        for name in vars(owner).get("__annotations__", {}):
            heading = headings.get(name, heading)
            if name in known - seen:
                seen.add(name)
                sections.setdefault(heading, []).append(name)
    return sections


def _group_help(parser: argparse.ArgumentParser, classes: tuple[Any, ...]) -> None:
    """Sort the flags under headings; `--no_…`, which means `--… false`, goes unlisted."""
    listed = {action.dest: action for action in reversed(parser._actions)}
    parser._action_groups.clear()
    for cls in classes:
        for heading, names in _headings(cls).items():
            group = parser.add_argument_group(heading)
            group._group_actions += [listed[name] for name in names]


def parse(command: str, classes: tuple[Any, ...], argv: list[str], *, defaults: dict[str, Any] | None = None) -> tuple:
    """Build one instance of each dataclass from `--config FILE.yaml` and flags; flags win.

    Args:
        defaults: of this command, where they differ from the fields'.

    Raises:
        ValueError: an unknown name (the nearest known one is named), or a value of the wrong kind.
    """
    from transformers import HfArgumentParser

    fields = [field for cls in classes for field in dataclasses.fields(cls)]
    types = [field.type for field in fields]
    usage = f"segrew {command} [--config FILE.yaml] [--name value ...]"
    parser = HfArgumentParser(classes, usage=usage, formatter_class=_HelpFormatter, allow_abbrev=False)
    _group_help(parser, classes)
    for field, kind in zip(fields, types, strict=True):  # it takes `| None` out of fields that other configs inherit
        field.type = kind
    computed = {f.name: f.default_factory() for f in fields if f.type is bool and callable(f.default_factory)}
    parser.set_defaults(**computed)  # it takes them for False
    known = sorted({name[2:] for action in parser._actions for name in action.option_strings if name[:2] == "--"})

    def refuse(message: str) -> None:
        raise ValueError(f"{message} (`segrew {command} --help` lists every flag)")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    path, flags = _split_config_flag(argv)
    settings = read_yaml(path) if path else {}
    many = {name for action in parser._actions if action.nargs in ("+", "*") for name in action.option_strings}
    for name, value in settings.items():
        if isinstance(value, list) and f"--{name}" not in many and name in known:
            refuse(f"--config {path}: {name} takes one value, found a list of {len(value)}.")
    flags = _without_nulls(flags, settings)
    typed = [word.split("=")[0][2:] for word in flags if word.startswith("--")]
    for name in [*settings, *typed]:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            refuse(f"unknown setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "."))
    parser.set_defaults(**(defaults or {}))
    parser.set_defaults(**_turned_off(settings, classes))
    *parsed, stray = parser.parse_args_into_dataclasses(
        args=_as_flags(settings) + flags, look_for_args_file=False, return_remaining_strings=True
    )
    if stray:
        refuse(f"unexpected '{stray[0]}'; settings are written --name value.")
    _check_numbers(tuple(parsed))
    return tuple(parsed)


def given(names: Iterable[str], *configs: Any) -> list[str]:
    """Return those of the settings that differ from their default."""
    owners = {field.name: (config, field) for config in configs for field in dataclasses.fields(config)}
    known = [(name, *owners[name]) for name in names if name in owners]
    return [name for name, config, field in known if getattr(config, name) != _default(field)]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def to_dict(*configs: Any) -> dict[str, Any]:
    """Return the resolved settings as plain data, for `run.json`."""
    merged: dict[str, Any] = {}
    for config in configs:
        merged.update(config.to_dict() if hasattr(config, "to_dict") else dataclasses.asdict(config))
    return {key: value for key, value in merged.items() if not callable(value)}
