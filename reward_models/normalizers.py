"""The location-aware reward normalizer: what is a typical reward at this place in a response?

Early segments score low with little spread, late ones high with much. Before PPO may compare them, each reward
is standardized by the mean and spread expected at its location p, in (0, 1].
"""

import copy
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from reward_models.location_fit import (
    Link,
    LocationBin,
    Regression,
    checked_rewards,
    fit_location_curves,
    fit_released_curves,
)
from reward_models.normalizer_parameters import (
    NEXT,
    Mode,
    Parameters,
    checked_parameters,
    read_object,
    scalar_parameters,
)
from reward_models.normalizer_presets import PRESETS
from segrew.segmentation import Segmentation

LocationBy = Literal["unit", "token"]


class LocationNormalizer:
    """Standardize a reward by what is usual at its location p in (0, 1].

        mean(p) = w_mu ln p + b_mu
        std(p)  = max(w_sigma ln p + b_sigma, std_floor)   link "linear" (arXiv 2501.02790)
                  exp(w_sigma ln p + b_sigma)              link "log", positive by construction
        transform(r, p) = (r - mean(p)) / std(p)

    An unguarded line for the spread turns negative for small p and flips the sign of the reward there, hence
    the floor. Use `fit`, `from_parameters` or `load`; before that nothing is transformed. One fit holds every mode
    of the paper's ablation (its table 4), and `with_mode` chooses another.

    Args:
        mode: location, both lines; global, one mean and spread over all units; last, those of each response's
            last unit; none, rewards as they are.
        regression, link: how the lines are estimated, see `fit_location_curves`.
        location_by: unit, p = (unit index + 1) / units; token, the share of tokens up to the unit's end.

    Attributes:
        fingerprint: of the segmentation rule that the rewards were read under; None if unknown.
        rule: the same rule in words, for messages.
        fitted_range: smallest and largest location seen by `fit`; None for given parameters.
        r2: coefficient of determination of both lines over the bins; None where the bins do not vary.
        bins: the points both lines were fitted through, with their residuals.
        modes: the parameters of each mode that there are numbers for.
    """

    def __init__(
        self,
        *,
        std_floor: int | float | None = None,
        fingerprint: str | None = None,
        rule: str | None = None,
        mode: Mode = "location",
        regression: Regression = "huber",
        link: Link = "linear",
        location_by: LocationBy = "unit",
    ):
        for value, choices in ((mode, Mode), (regression, Regression), (link, Link), (location_by, LocationBy)):
            if value not in get_args(choices):
                raise ValueError(f"'{value}' is no choice of a normalizer; it is one of {', '.join(get_args(choices))}")
        self.std_floor = self._given_floor = std_floor
        self.fingerprint = fingerprint
        self.rule = rule
        self.mode, self.regression, self.link, self.location_by = mode, regression, link, location_by
        self.w_mu = self.w_sigma = self.b_mu = self.b_sigma = math.nan
        self.modes: dict[Mode, Parameters] = {}
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
        """Fit both lines on ln p, one point per location bin (see `location_fit`), and the scalars beside them.

        Args:
            compat: "dense_rlhf_release" fits by the recipe of 2501.02790's code, points at rounded p and all.
        """
        r, p = checked_rewards(rewards, locations)
        if compat == "dense_rlhf_release":
            if (self.regression, self.link, self.location_by) != ("huber", "linear", "unit"):
                raise ValueError(
                    f"compat {compat} has its own recipe of the fit; leave --regression, --link and --location out"
                )
            curves = fit_released_curves(r, p)
        else:
            curves = fit_location_curves(r, p, regression=self.regression, link=self.link)
        (w_mu, b_mu), (w_sigma, b_sigma) = curves.mean_line, curves.std_line
        fitted = checked_parameters(self.link, w_mu, w_sigma, b_mu, b_sigma, self._given_floor)
        self.modes = {
            "location": fitted,
            "none": scalar_parameters(self.link, 0.0, 1.0),
            "global": scalar_parameters(self.link, r.mean(), r.std()),
        }
        last = r[p > 1 - 1e-9]
        if last.size > 1 and last.std() > 0:
            self.modes["last"] = scalar_parameters(self.link, last.mean(), last.std())
        self.bins, self.r2 = curves.bins, {"mean": curves.mean_r2, "std": curves.std_r2}
        self.fitted_range, self._floor_reported = (float(p.min()), float(p.max())), False
        self._use(self.mode)
        if self.mode == "location":
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
        **attributes: Any,
    ) -> "LocationNormalizer":
        """Build one from known numbers; w_mu = w_sigma = 0 is the scalar normalizer (r - b_mu) / b_sigma.

        Args:
            attributes: fingerprint, rule, link, location_by.
        """
        normalizer = cls(std_floor=std_floor, **attributes)
        location = checked_parameters(normalizer.link, w_mu, w_sigma, b_mu, b_sigma, std_floor)
        normalizer.modes = {"location": location, "none": scalar_parameters(normalizer.link, 0.0, 1.0)}
        normalizer._use("location")
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

    def with_mode(self, mode: Mode) -> "LocationNormalizer":
        """Return the same fit in another mode.

        Raises:
            ValueError: it holds no numbers for it.
        """
        other = copy.copy(self)
        other._use(mode)
        return other

    def save(self, path: str | Path) -> None:
        """Write everything, the bins included, as JSON; a reader never sees half a file."""
        self._require_fit()
        design = ("mode", "regression", "link", "location_by", "fingerprint", "rule", "fitted_range", "r2")
        record = {
            **self.modes[self.mode]._asdict(),
            **{name: getattr(self, name) for name in design},
            "modes": {mode: parameters._asdict() for mode, parameters in self.modes.items()},
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
            raise FileNotFoundError(f"{path}: no such normalizer; {NEXT}")
        record = read_object(path)
        missing = [key for key in (*Parameters._fields, "fingerprint") if key not in record]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}, so no reward can be normalized with it; {NEXT}")
        try:
            return cls._from_record(record)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: {error}; {NEXT}") from None

    @classmethod
    def _from_record(cls, record: Mapping[str, Any]) -> "LocationNormalizer":
        names = ("fingerprint", "rule", "mode", "regression", "link", "location_by")
        normalizer = cls(**{name: record[name] for name in names if name in record})
        for mode, numbers in {**(record.get("modes") or {}), normalizer.mode: record}.items():
            given = [numbers[name] for name in Parameters._fields]
            normalizer.modes[mode] = checked_parameters(normalizer.link, *given, complete=True)
        normalizer._use(normalizer.mode)
        normalizer.bins = [LocationBin(**point) for point in record.get("bins") or []]
        if record.get("fitted_range"):
            low, high = record["fitted_range"]
            normalizer.fitted_range = (float(low), float(high))
        normalizer.r2 = {**normalizer.r2, **(record.get("r2") or {})}
        return normalizer

    def locations(self, segmentation: Segmentation) -> Float[Tensor, "b s"]:
        """Return the location of each unit as this normalizer measures it; 0 in padding."""
        return segmentation.locations if self.location_by == "unit" else segmentation.token_locations

    def mean(self, p: Any) -> Any:
        """mean(p) = w_mu ln p + b_mu; a number or a float32 tensor on its device, as p is."""
        self._require_fit()
        return self.w_mu * _log(p) + self.b_mu

    def std(self, p: Any) -> Any:
        """The spread at p, positive everywhere; a number or a float32 tensor, as p is."""
        self._require_fit()
        self._report_floor(_smallest(p))
        line = self.w_sigma * _log(p) + self.b_sigma
        if self.link == "log":
            line = line.exp() if isinstance(line, Tensor) else math.exp(line)
        if self.std_floor is None:
            return line
        return line.clamp(min=self.std_floor) if isinstance(line, Tensor) else max(line, self.std_floor)

    def transform(self, rewards: Float[Tensor, "*axes"], locations: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """(r - mean(p)) / std(p) in float32; location 0 marks padding: 0 whatever the reward."""
        real = locations > 0
        p = torch.where(real, locations.float(), 1.0)
        r = torch.where(real, rewards.float(), 0.0)  # before the arithmetic: a NaN in padding has no gradient either
        return torch.where(real, (r - self.mean(p)) / self.std(p), 0.0)

    def normalize(self, rewards: Float[Tensor, "b s"], segmentation: Segmentation) -> Float[Tensor, "b s"]:
        """`transform` at the units' own locations."""
        return self.transform(rewards, self.locations(segmentation))

    @property
    def formulas(self) -> tuple[str, str]:
        """Mean and spread as functions of p, in words."""
        self._require_fit()
        spread = f"{self.w_sigma:+.4f} ln p {self.b_sigma:+.4f}"
        return f"{self.w_mu:+.4f} ln p {self.b_mu:+.4f}", f"exp({spread})" if self.link == "log" else spread

    @property
    def end_offset(self) -> float | None:
        """How far rewards at p = 1 lie from the fit, in its standard deviations; None if p = 1 was not seen.

        The last unit is read at the stop token, whose rewards may follow another law than those before it.
        """
        last = self.bins[-1] if self.bins else None
        return last.mean_residual / self.std(1.0) if last is not None and last.location > 1 - 1e-9 else None

    def require(
        self, fingerprint: str, *, rule: str, source: str | Path = "the normalizer", remedy: str = NEXT
    ) -> None:
        """Refuse rewards read under another segmentation rule than the one this was fitted for."""
        if self.fingerprint != fingerprint:
            own = self.rule or self.fingerprint or "an unknown rule"
            raise ValueError(
                f"{source} was calibrated for segmentation {own} but the rewards are read under {rule} "
                f"(fingerprint {fingerprint}), where typical rewards differ; {remedy}"
            )

    def _use(self, mode: Mode) -> None:
        if mode not in self.modes:
            held = ", ".join(self.modes) or "none at all"
            raise ValueError(f"the normalizer holds no numbers for the mode '{mode}' (it has {held}); {NEXT}")
        self.mode = mode
        self.w_mu, self.w_sigma, self.b_mu, self.b_sigma, self.std_floor = self.modes[mode]

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
        if smallest is None or self._floor_reported or self.std_floor is None:
            return
        line = self.w_sigma * math.log(smallest) + self.b_sigma
        line = math.exp(line) if self.link == "log" else line
        if line >= self.std_floor:
            return
        self._floor_reported = True
        warnings.warn(
            f"the fitted spread is {line:.3g} at location {smallest:.3g}, below the floor {self.std_floor:.3g}, "
            "which is used instead: rewards this early in a response are normalized by a guess. Longer units or "
            "more responses in the calibration set help",
            stacklevel=3,
        )


def _log(p: Any) -> Any:
    return p.float().log() if isinstance(p, Tensor) else math.log(p)


def _smallest(p: Any) -> float | None:
    """The smallest location, or 1/s among s units where reading it would wait for a device."""
    if not isinstance(p, Tensor):
        return float(p)
    if p.numel() == 0 or torch.compiler.is_compiling():
        return None
    return float(p.min()) if p.device.type == "cpu" else 1.0 / p.shape[-1] if p.dim() else None
