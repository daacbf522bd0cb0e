"""The numbers of a location normalizer: what they are for each mode, and what is refused."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reward_models.location_fit import Link

Mode = Literal["none", "global", "last", "location"]
NEXT = "run `segrew calibrate` on the reward model again"


class Parameters(NamedTuple):
    """Both lines over ln p, that of the spread under its link; `std_floor` None where nothing bounds it below."""

    w_mu: float
    w_sigma: float
    b_mu: float
    b_sigma: float
    std_floor: float | None


def scalar_parameters(link: Link, mean: float, std: float) -> Parameters:
    """Return the parameters of one mean and one spread for every location."""
    return checked_parameters(link, 0.0, 0.0, float(mean), math.log(std) if link == "log" else float(std), None)


def checked_parameters(
    link: Link, w_mu: Any, w_sigma: Any, b_mu: Any, b_sigma: Any, std_floor: Any, *, complete: bool = False
) -> Parameters:
    """Return finite parameters with a positive spread at p = 1.

    Args:
        std_floor: None sets std(1)/10 under the linear link and no floor under the logarithmic one.
        complete: a missing floor is an error where one is needed.

    Raises:
        ValueError: a number is not finite, or a spread is not positive.
    """
    flat = b_sigma == -math.inf if link == "log" else _finite("b_sigma", b_sigma) <= 0
    if flat:
        raise ValueError(
            f"the spread at the end of a response, std(1), comes from b_sigma = {b_sigma:g}; it must be "
            "positive. A reward model that gives every unit the same reward cannot be normalized: train it first"
        )
    if std_floor is None and link == "linear" and not complete:
        std_floor = b_sigma / 10
    if link == "linear" or std_floor is not None:
        std_floor = _finite("std_floor", std_floor)
        if std_floor <= 0:
            raise ValueError(f"std_floor is {std_floor!r}; it must be a positive number or left out for std(1)/10")
    w_mu, w_sigma = _finite("w_mu", w_mu), _finite("w_sigma", w_sigma)
    return Parameters(w_mu, w_sigma, _finite("b_mu", b_mu), _finite("b_sigma", b_sigma), std_floor)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def read_object(path: str | Path) -> Mapping[str, Any]:
    """Read a JSON object, or say that the normalizer must be fitted again."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); {NEXT}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"{path} holds {type(record).__name__} where a JSON object is expected; {NEXT}")
    return record
