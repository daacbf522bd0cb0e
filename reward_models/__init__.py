"""Stage 1: train, calibrate, benchmark and inspect segment reward models."""

from importlib import import_module
from typing import Any

_HOMES = {
    "LocationNormalizer": "normalizers",
    "SegmentRewardModel": "segment_reward_model",
    "preference_loss": "losses",
    "rewardbench_scores": "rewardbench_sections",
}

__all__ = ["LocationNormalizer", "SegmentRewardModel", "preference_loss", "rewardbench_scores"]


def __getattr__(name: str) -> Any:
    """Import a public name when first asked for, so that one does not pull in the libraries of the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
