"""The location-aware reward normalizer: what is a typical reward at this place in a response?

Early segments score low with little spread, late ones high with much. Before PPO may compare them, each reward
is standardized by the mean and spread expected at its location p = (unit index + 1) / (units in the response).
"""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from reward_models.location_fit import LocationBin, fit_location_curves, fit_released_curves
from reward_models.normalizer_presets import PRESETS

_PARAMETERS = ("w_mu", "w_sigma", "b_mu", "b_sigma")
_NEXT = "run `segrew calibrate` on the reward model again"


class LocationNormalizer:
    """Standardize a reward by what is usual at its location p in (0, 1].

        mean(p) = w_mu ln p + b_mu
        std(p)  = max(w_sigma ln p + b_sigma, std_floor)
        transform(r, p) = (r - mean(p)) / std(p)

    (arXiv 2501.02790.) An unguarded line for the spread turns negative for small p and flips the sign of the
    reward there, hence the floor. Use `fit`, `from_parameters` or `load`; before that nothing is transformed.

    Attributes:
        fingerprint: of the segmentation rule that the rewards were read under; None if unknown.
        rule: the same rule in words, for messages.
        fitted_range: smallest and largest location seen by `fit`; None for given parameters.
        r2: coefficient of determination of both lines over the bins; None where the bins do not vary.
        bins: the points both lines were fitted through, with their residuals.
    """

    def __init__(
        self, *, std_floor: int | float | None = None, fingerprint: str | None = None, rule: str | None = None
    ):
        self.std_floor = std_floor
        self.fingerprint = fingerprint
        self.rule = rule
        self.w_mu = self.w_sigma = self.b_mu = self.b_sigma = math.nan
        self.fitted_range: tuple[float, float] | None = None
        self.r2: dict[str, float | None] = {"mean": None, "std": None}
        self.bins: list[LocationBin] = []
        self._floor_reported = False

    def fit(
        self,
        rewards: Float[Tensor, " n"] | Float[np.ndarray, " n"],
        locations: Float[Tensor, " n"] | Float[np.ndarray, " n"],
        *,
        compat: str | None = None,
    ) -> "LocationNormalizer":
        """Fit both lines by Huber regression on ln p, one point per location bin (see `location_fit`).

        Args:
            compat: "dense_rlhf_release" fits by the recipe of 2501.02790's code, points at rounded p and all.
        """
        r, p = _as_float64(rewards), _as_float64(locations)
        if r.shape != p.shape:
            raise ValueError(f"{r.size} rewards but {p.size} locations: each reward needs its own location")
        if r.size == 0:
            raise ValueError("no rewards to fit a normalizer on: pass the unit rewards of some responses")
        if not np.isfinite(r).all():
            raise ValueError(
                f"{np.count_nonzero(~np.isfinite(r))} of {r.size} rewards are NaN or infinite, so no mean or "
                "spread can be fitted: check the reward model's scores (`segrew doctor`)"
            )
        if not ((p > 0) & (p <= 1)).all():
            raise ValueError(
                "locations must lie in (0, 1], being (unit index + 1) / units; "
                f"got {p.min():g} to {p.max():g}. Leave padding out with the unit mask"
            )
        curves = (fit_released_curves if compat == "dense_rlhf_release" else fit_location_curves)(r, p)
        self._set_parameters(*curves.mean_line, *curves.std_line)
        self.bins, self.r2 = curves.bins, {"mean": curves.mean_r2, "std": curves.std_r2}
        self.fitted_range = (float(p.min()), float(p.max()))
        self._report_floor(self.fitted_range[0])
        self._report_end()
        return self

    @classmethod
    def from_parameters(
        cls,
        w_mu: int | float,
        w_sigma: int | float,
        b_mu: int | float,
        b_sigma: int | float,
        *,
        std_floor: int | float | None = None,
        fingerprint: str | None = None,
        rule: str | None = None,
    ) -> "LocationNormalizer":
        """Build one from known numbers; w_mu = w_sigma = 0 is the scalar normalizer (r - b_mu) / b_sigma."""
        normalizer = cls(std_floor=std_floor, fingerprint=fingerprint, rule=rule)
        normalizer._set_parameters(w_mu, b_mu, w_sigma, b_sigma)
        return normalizer

    @classmethod
    def from_preset(cls, name: str, *, fingerprint: str | None = None, rule: str | None = None) -> "LocationNormalizer":
        """Build a normalizer that was released with 2501.02790, such as "phi3-mini-1.75".

        Args:
            fingerprint, rule: of the reward model it is used for; its rule must be the one of the preset.

        Raises:
            ValueError: there is no such preset, or it was fitted for another rule.
        """
        if name not in PRESETS:
            raise ValueError(f"no normalizer preset {name!r}: there are {', '.join(PRESETS)}")
        preset = PRESETS[name]
        if rule is not None and rule.split(" as in ")[0] != preset.rule:
            raise ValueError(f"preset {name} was fitted for rule {preset.rule}, and the rewards are read under {rule}")
        return cls.from_parameters(*preset[1:], fingerprint=fingerprint, rule=rule or preset.rule)

    def save(self, path: str | Path) -> None:
        """Write everything, the bins included, as JSON; a reader never sees half a file."""
        self._require_fit()
        record = {
            **{name: getattr(self, name) for name in (*_PARAMETERS, "std_floor")},
            "fingerprint": self.fingerprint,
            "rule": self.rule,
            "fitted_range": self.fitted_range,
            "r2": self.r2,
            "bins": [dataclasses.asdict(point) for point in self.bins],
        }
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, target)

    @classmethod
    def load(cls, path: str | Path) -> "LocationNormalizer":
        """Read a saved normalizer; a damaged file is an error, never (0, 1) in silence."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such normalizer; {_NEXT}")
        record = _read_object(path)
        missing = [key for key in (*_PARAMETERS, "std_floor", "fingerprint") if key not in record]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}, so no reward can be normalized with it; {_NEXT}")
        try:
            w_mu, w_sigma, b_mu, b_sigma, floor = (_finite(record, key) for key in (*_PARAMETERS, "std_floor"))
            normalizer = cls(std_floor=floor, fingerprint=record["fingerprint"], rule=record.get("rule"))
            normalizer._set_parameters(w_mu, b_mu, w_sigma, b_sigma)
            normalizer.bins = [LocationBin(**point) for point in record.get("bins") or []]
            if record.get("fitted_range"):
                low, high = record["fitted_range"]
                normalizer.fitted_range = (float(low), float(high))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}; {_NEXT}") from None
        normalizer.r2 = {**normalizer.r2, **(record.get("r2") or {})}
        return normalizer

    def mean(self, p: Any) -> Any:
        """mean(p) = w_mu ln p + b_mu; a number or a float32 tensor on its device, as p is."""
        self._require_fit()
        return self.w_mu * _log(p) + self.b_mu

    def std(self, p: Any) -> Any:
        """std(p) = max(w_sigma ln p + b_sigma, std_floor) > 0; a number or a float32 tensor, as p is."""
        self._require_fit()
        self._report_floor(_smallest(p))
        line = self.w_sigma * _log(p) + self.b_sigma
        return line.clamp(min=self.std_floor) if isinstance(line, Tensor) else max(line, self.std_floor)

    def transform(self, rewards: Float[Tensor, "*axes"], locations: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """(r - mean(p)) / std(p) in float32; location 0 marks padding: 0 whatever the reward."""
        real = locations > 0
        p = torch.where(real, locations.float(), 1.0)
        r = torch.where(real, rewards.float(), 0.0)  # before the arithmetic: a NaN in padding has no gradient either
        return torch.where(real, (r - self.mean(p)) / self.std(p), 0.0)

    @property
    def end_offset(self) -> float | None:
        """How far rewards at p = 1 lie from the fit, in its standard deviations; None if p = 1 was not seen.

        The last unit is read at the stop token, whose rewards may follow another law than those before it.
        """
        last = self.bins[-1] if self.bins else None
        return last.mean_residual / self.std(1.0) if last is not None and last.location > 1 - 1e-9 else None

    def require(self, fingerprint: str, *, rule: str, source: str | Path = "the normalizer") -> None:
        """Refuse rewards read under another segmentation rule than the one this was fitted for."""
        if self.fingerprint != fingerprint:
            own = self.rule or self.fingerprint or "an unknown rule"
            raise ValueError(
                f"{source} was calibrated for segmentation {own} but the rewards are read under {rule} "
                f"(fingerprint {fingerprint}), where typical rewards differ; {_NEXT}"
            )

    def _set_parameters(self, w_mu: int | float, b_mu: int | float, w_sigma: int | float, b_sigma: int | float) -> None:
        values = {"w_mu": w_mu, "w_sigma": w_sigma, "b_mu": b_mu, "b_sigma": b_sigma}
        w_mu, w_sigma, b_mu, b_sigma = (_finite(values, name) for name in _PARAMETERS)
        if b_sigma <= 0:
            raise ValueError(
                f"the spread at the end of a response, std(1) = b_sigma, is {b_sigma:g}; it must be "
                "positive. A reward model that gives every unit the same reward cannot be normalized: train it first"
            )
        floor = b_sigma / 10 if self.std_floor is None else self.std_floor
        if not 0 < floor < math.inf:
            raise ValueError(f"std_floor is {floor!r}; it must be a positive number or left out for std(1)/10")
        self.w_mu, self.w_sigma, self.b_mu, self.b_sigma = w_mu, w_sigma, b_mu, b_sigma
        self.std_floor = float(floor)

    def _require_fit(self) -> None:
        if math.isnan(self.b_sigma):
            raise ValueError("this LocationNormalizer has no parameters yet: call fit, from_parameters or load first")

    def _report_end(self) -> None:
        """Warn where every finished response would earn a bonus or a fine just for its last unit."""
        if self.end_offset is not None and abs(self.end_offset) > 1:
            warnings.warn(
                f"the last unit of a response has a mean reward {self.end_offset:+.1f} standard deviations from the "
                "fit: it follows another law than the units before it, so PPO is paid that much for ending. Where it "
                "is read at the stop token, `train-rm --read_position content` reads it one token earlier",
                stacklevel=3,
            )

    def _report_floor(self, smallest: float | None) -> None:
        """Warn, once in the life of a normalizer, where its line for the spread falls below the floor."""
        if smallest is None or self._floor_reported:
            return
        assert self.std_floor is not None
        line = self.w_sigma * math.log(smallest) + self.b_sigma
        if line >= self.std_floor:
            return
        self._floor_reported = True
        warnings.warn(
            f"the fitted spread is {line:.3g} at location {smallest:.3g}, below the floor {self.std_floor:.3g}, "
            "which is used instead: rewards this early in a response are normalized by a guess. Longer units or "
            "more responses in the calibration set help",
            stacklevel=3,
        )


def _finite(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def _as_float64(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _log(p: Any) -> Any:
    return p.float().log() if isinstance(p, Tensor) else math.log(p)


def _smallest(p: Any) -> float | None:
    """The smallest location, or 1/s among s units where reading it would wait for a device."""
    if not isinstance(p, Tensor):
        return float(p)
    if p.numel() == 0 or torch.compiler.is_compiling():
        return None
    return float(p.min()) if p.device.type == "cpu" else 1.0 / p.shape[-1] if p.dim() else None


def _read_object(path: str | Path) -> Mapping[str, Any]:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); {_NEXT}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"{path} holds {type(record).__name__} where a JSON object is expected; {_NEXT}")
    return record
