"""Reward models as files: stock sequence-classification checkpoints that any reader understands."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging

from segrew.embedded_model import resolve_model
from segrew.language_models import plain_model
from segrew.run_directory import read_json, write_json

ADAPTER_FILE = "adapter_config.json"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from warning of a new head; we say it ourselves, once, or refuse."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def load_classifier(
    name_or_path: str | Path, *, new_head: bool = False, dtype: torch.dtype | str = "auto"
) -> nn.Module:
    """Load a one-label sequence classifier with head `score`.

    Args:
        new_head: the source may be a plain language model, which gets a new head.

    Raises:
        ValueError: no model there, an encoder, or a checkpoint whose head is missing.
    """
    path = resolve_model(str(name_or_path))
    options: dict[str, Any] = {"num_labels": 1, "dtype": dtype}
    adapter = (Path(path) / ADAPTER_FILE).is_file()
    model: Any
    try:
        with _quiet():
            if adapter:
                model, missing = _load_adapter(path, options), []
            else:
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    path, output_loading_info=True, **options
                )
                missing = sorted(info["missing_keys"])
    except (OSError, KeyError) as error:
        raise ValueError(f"no model at '{name_or_path}': {str(error).splitlines()[0]}") from None
    plain = plain_model(model)
    if not isinstance(getattr(plain, "score", None), nn.Module):
        raise ValueError(
            f"'{name_or_path}' ({type(plain).__name__}) has no head named 'score': segrew reads a reward after "
            "every token, so it needs a causal model (Llama, Qwen, Mistral, Phi, Gemma, GPT-2, …), not an encoder."
        )
    others = [name for name in missing if name != "score.weight"]
    if others or (missing and not new_head):
        raise ValueError(
            f"'{name_or_path}': the weights {', '.join(missing)} are missing from the checkpoint; a random "
            "stand-in would score noise. Restore the files, or train it again."
        )
    if missing:
        head: Any = model.score
        nn.init.normal_(head.weight, std=1.0 / (head.in_features + 1))
    return model


def _load_adapter(path: str, options: dict[str, Any]) -> nn.Module:
    from peft import PeftModel
    from safetensors import safe_open

    with safe_open(Path(path) / "adapter_model.safetensors", "pt") as file:
        if not any("score" in name for name in file.keys()):  # noqa: SIM118, a safetensors handle is no dict
            raise ValueError(f"'{path}': the adapter carries no head ('score.weight'); it cannot score.")
    base = read_json(Path(path) / ADAPTER_FILE)["base_model_name_or_path"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(resolve_model(base), **options)
    return PeftModel.from_pretrained(model, path)


def write_for_older_readers(directory: Path) -> None:
    """Name the rotary base and tokenizer class as transformers 4 did, which otherwise takes wrong defaults."""
    config_file = directory / "config.json"
    if config_file.exists():
        config = json.loads(config_file.read_text())
        theta = (config.get("rope_parameters") or {}).get("rope_theta")
        if theta is not None:
            write_json(config_file, config | {"rope_theta": theta})
    tokenizer_file = directory / "tokenizer_config.json"
    if tokenizer_file.exists():
        tokenizer = json.loads(tokenizer_file.read_text())
        if tokenizer.get("tokenizer_class") == "TokenizersBackend":
            write_json(tokenizer_file, tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"})


def config_of(name_or_path: str) -> Any:
    """Return a model's configuration without its weights."""
    try:
        return AutoConfig.from_pretrained(resolve_model(name_or_path))
    except (OSError, ValueError) as error:
        raise ValueError(f"no model at '{name_or_path}': {str(error).splitlines()[0]}") from None
