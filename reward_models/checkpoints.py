"""Reward models as files: stock sequence-classification checkpoints that any reader understands."""

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging

from reward_models.card import CARD_FILE
from reward_models.foreign_checkpoints import head_renaming, weight_names
from segrew.cpu import fit_to_cpu
from segrew.embedded_model import resolve_model
from segrew.language_models import plain_model
from segrew.run_directory import read_json, write_json

ADAPTER_FILE = "adapter_config.json"
ATTENTION = "unit_attention"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the log of transformers off the terminal where we say what matters ourselves, or refuse."""
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
    options: dict[str, Any] = {"num_labels": 1, "dtype": dtype, "trust_remote_code": False}
    model: Any
    missing, unexpected = list[str](), set[str]()
    try:
        with quiet():
            if (Path(path) / ADAPTER_FILE).is_file():
                model = _load_adapter(path, options)
            else:
                renaming = head_renaming(Path(path)) if Path(path).is_dir() else None
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    path, output_loading_info=True, key_mapping=renaming, **options
                )
                missing, unexpected = sorted(info["missing_keys"]), set(info["unexpected_keys"])
    except (OSError, KeyError) as error:
        raise ValueError(f"no model at '{name_or_path}': {str(error).splitlines()[0]}") from None
    except RuntimeError as error:  # transformers on weights of another shape
        reason = " ".join(str(error).split())
        raise ValueError(f"'{name_or_path}' is no reward model of one score: {reason[:300]}") from None
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
        warnings.warn(
            f"'{name_or_path}' has no reward head; training starts a new one (score.weight, random)", stacklevel=2
        )
    if f"{ATTENTION}.weight" in unexpected:
        add_unit_attention(model, _read_weight(Path(path), f"{ATTENTION}.weight"))
    fit_to_cpu(model)
    return model


def add_unit_attention(model: nn.Module, weight: Tensor | None = None) -> None:
    """Give a classifier the second linear head of the aggregator `learned`; at zero, it is the mean.

    It is saved among the weights as `unit_attention.weight`, which stock classes pass over.
    """
    plain = plain_model(model)
    head = plain.score
    attention = nn.Linear(head.in_features, 1, bias=False, dtype=head.weight.dtype, device=head.weight.device)
    with torch.no_grad():
        attention.weight.zero_() if weight is None else attention.weight.copy_(weight)
    setattr(plain, ATTENTION, attention)


def require_unit_attention(model: nn.Module, name: str) -> nn.Module:
    """Return the head of the aggregator `learned`.

    Raises:
        ValueError: the checkpoint has none.
    """
    attention = getattr(plain_model(model), ATTENTION, None)
    if attention is None:
        raise ValueError(
            f"the aggregator 'learned' needs the weights {ATTENTION}.weight, which the checkpoint of the reward model "
            f"on {name} lacks; restore the files, or train it again."
        )
    return attention


def _read_weight(directory: Path, name: str) -> Tensor:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118, a safetensors handle is no dict
                return file.get_tensor(name)
    raise ValueError(f"{directory}: no safetensors file holds {name}.")


def require_head(checkpoint: Path) -> None:
    """Refuse to resume from a training checkpoint without its head, which the Trainer would leave at random values.

    Raises:
        ValueError: the head is not among the weights there.
    """
    if not any(re.search(r"(^|\.)score\b.*weight$", name) for name in weight_names(checkpoint)):
        raise ValueError(
            f"{checkpoint}: the head, score.weight, is not among the weights, so training cannot go on from there; "
            "resume from another checkpoint."
        )


def find_checkpoint(name_or_path: str | Path) -> Path:
    """Return the directory of a reward model, fetching it from the hub if it is no local one.

    Raises:
        ValueError: neither has a model under that name.
    """
    path = Path(name_or_path)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(str(name_or_path)))
        except Exception as error:  # the hub's errors are many; each means that the model cannot be had
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{name_or_path} is no reward-model directory, and the hub gives no such model: {reason}"
            ) from None
    if not any((path / name).is_file() for name in ("config.json", ADAPTER_FILE, CARD_FILE)):
        raise ValueError(
            f"{name_or_path} is no reward-model directory: it has no model. Train one with `segrew train-rm`."
        )
    return path


def _load_adapter(path: str, options: dict[str, Any]) -> nn.Module:
    from peft import PeftModel

    with safe_open(Path(path) / "adapter_model.safetensors", "pt") as file:
        if not any("score" in name for name in file.keys()):  # noqa: SIM118, a safetensors handle is no dict
            raise ValueError(f"'{path}': the adapter carries no head ('score.weight'); it cannot score.")
    settings = read_json(Path(path) / ADAPTER_FILE)
    base = settings["base_model_name_or_path"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(resolve_model(base), **options)
    if ATTENTION in (settings["modules_to_save"] or ()):
        add_unit_attention(model)
    return PeftModel.from_pretrained(model, path)


def write_for_older_readers(directory: Path) -> None:
    """Name the rotary base, tokenizer class and outputs as transformers 4 did, which otherwise takes wrong defaults.

    Its default outputs have `token_type_ids`, which causal models refuse.
    """
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
            outputs = {"model_input_names": ["input_ids", "attention_mask"]}
            write_json(tokenizer_file, outputs | tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"})


def config_of(name_or_path: str) -> Any:
    """Return a model's configuration without its weights."""
    try:
        return AutoConfig.from_pretrained(resolve_model(name_or_path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model at '{name_or_path}': {str(error).splitlines()[0]}") from None
