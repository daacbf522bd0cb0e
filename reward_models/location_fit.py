"""How the two lines of the location normalizer are estimated from unit rewards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

Vector = Float[np.ndarray, " k"]
Line = tuple[float, float]
Regression = Literal["huber", "weighted"]
Link = Literal["linear", "log"]


@dataclass(frozen=True)
class LocationBin:
    """One point of the fit: the rewards at one location, or at a few neighbouring ones where each is rare."""

    location: float
    mean: float
    std: float
    count: int
    mean_residual: float
    std_residual: float


class LocationCurves(NamedTuple):
    """Both lines as (slope, intercept) over ln p, that of the spread under its link; their fit, and the points."""

    mean_line: Line
    std_line: Line
    mean_r2: float | None
    std_r2: float | None
    bins: list[LocationBin]


def fit_location_curves(
    rewards: Float[np.ndarray, " n"],
    locations: Float[np.ndarray, " n"],
    *,
    regression: Regression = "huber",
    link: Link = "linear",
) -> LocationCurves:
    """Fit mean and spread as lines in ln p through one point per location bin.

    A location is kept exact where it has rewards enough; rarer neighbours are merged (`bin_locations`).
    Nothing is rounded, so long responses create no false point near p = 0. A bin sits at its mean ln p, where
    a line in ln p is unbiased whatever the bin's width, and its spread is taken about the fitted mean and in
    units of the fitted spread, so that merging inflates nothing. For a bin of one location this is its
    population standard deviation.

    Args:
        regression: huber gives each bin the same weight and bounds the pull of outliers (2501.02790);
            weighted is least squares with a bin's number of rewards as its weight.
        link: linear fits the spread itself, log its logarithm, which keeps it positive everywhere.
    """
    bin_of, counts = bin_locations(locations)
    log_p, through = np.log(locations), _REGRESSIONS[regression]
    forward, inverse = _LINKS[link]

    def by_bin(values: np.ndarray) -> np.ndarray:
        return np.bincount(bin_of, weights=values) / counts

    x, means = by_bin(log_p), by_bin(rewards)
    mean_line = through(x, means, counts)
    residuals = rewards - _evaluate(mean_line, log_p)

    def bin_spread(scale: np.ndarray, scale_at_bin: np.ndarray) -> np.ndarray:
        z = residuals / scale
        return np.sqrt(by_bin((z - by_bin(z)[bin_of]) ** 2)) * scale_at_bin

    def spread_line(stds: np.ndarray) -> Line:
        seen = stds > 0 if link == "log" else np.full(len(stds), True)
        return through(x[seen], forward(stds[seen]), counts[seen]) if seen.any() else (0.0, -math.inf)

    stds = bin_spread(np.ones_like(rewards), np.ones_like(x))
    std_line = spread_line(stds)
    for _ in range(50):  # a contraction where bins are narrow: two or three rounds settle it
        positive = max(float(inverse(std_line[1])), float(stds.max())) * 1e-3
        if positive == 0 or len(x) == len(np.unique(locations)):
            break  # no spread at all, or nothing was merged: the points cannot change
        scale, at_bin = (np.maximum(inverse(_evaluate(std_line, at)), positive) for at in (log_p, x))
        previous, stds = stds, bin_spread(scale, at_bin)
        std_line = spread_line(stds)
        if np.allclose(stds, previous, rtol=1e-12, atol=0):
            break

    mean_residuals, std_residuals = means - _evaluate(mean_line, x), stds - inverse(_evaluate(std_line, x))
    columns = (np.exp(x), means, stds, counts, mean_residuals, std_residuals)
    bins = [LocationBin(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    return LocationCurves(mean_line, std_line, _r2(means, mean_residuals), _r2(stds, std_residuals), bins)


def checked_rewards(rewards: Any, locations: Any) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return rewards and their locations in float64.

    Raises:
        ValueError: there are none, they differ in number, or one is out of range.
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
    return r, p


def _as_float64(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def fit_released_curves(rewards: Float[np.ndarray, " n"], locations: Float[np.ndarray, " n"]) -> LocationCurves:
    """Fit as the code of 2501.02790 does, for comparison: p to three decimals, x = ln(p + 1e-10), a light ridge.

    Beyond 2,000 units p rounds to 0, a point far out at x = −23.
    """
    places, bin_of, counts = np.unique(locations.round(3), return_inverse=True, return_counts=True)
    means = np.bincount(bin_of, weights=rewards) / counts
    stds = np.sqrt(np.bincount(bin_of, weights=(rewards - means[bin_of]) ** 2) / counts)
    x = np.log(places + 1e-10)
    mean_line, std_line = (_huber(x, y, alpha=1e-4, tol=1e-5) for y in (means, stds))
    residuals = means - _evaluate(mean_line, x), stds - _evaluate(std_line, x)
    columns = (places, means, stds, counts, *residuals)
    bins = [LocationBin(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    return LocationCurves(mean_line, std_line, _r2(means, residuals[0]), _r2(stds, residuals[1]), bins)


def bin_locations(locations: Float[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " k"]]:
    """Group rewards by location, merging neighbours, smallest first, until each bin has enough for a spread.

    Enough is 20 rewards; fewer (down to 2) where that would leave under 20 bins, more where over 200.

    Returns:
        The bin of each reward, bins ordered by location, and the number of rewards in each bin.
    """
    n = locations.size
    enough = max(2, min(20, n // 20), n // 200)
    _, place, tally = np.unique(locations, return_inverse=True, return_counts=True)
    bin_of_place = np.empty(len(tally), dtype=np.int64)
    current = held = opened = 0
    for i, count in enumerate(tally.tolist()):
        if held > 0 and current and count >= enough:  # a common location stays alone: the few before it step back
            bin_of_place[opened:i], held = current - 1, 0
        opened = opened if held else i
        bin_of_place[i] = current
        held += count
        if held >= enough:
            current, held = current + 1, 0
    if held and current:
        bin_of_place[opened:] = current - 1
    bin_of = bin_of_place[place]
    return bin_of, np.bincount(bin_of)


def robust_line(x: Vector, y: Vector) -> Line:
    """Huber regression of y on x, as (slope, intercept); one x, or no variation, gives slope 0.

    Runs on standardized least-squares residuals: Huber's estimate with its concomitant scale is equivariant
    to that, and the optimizer sees the same well-scaled problem whatever the units. An exact line comes back
    exactly.
    """
    centre, width = x.mean(), x.std()
    if width < 1e-12:
        return 0.0, float(y.mean())
    u = (x - centre) / width
    slope, intercept = float(u @ y) / len(u), float(y.mean())
    residuals = y - slope * u - intercept
    scale = residuals.std()
    if scale > 1e-12 * max(1.0, float(np.abs(y).max())):
        extra_slope, extra_intercept = _huber(u, residuals / scale)
        slope, intercept = slope + scale * extra_slope, intercept + scale * extra_intercept
    return float(slope / width), float(intercept - slope * centre / width)


def weighted_line(x: Vector, y: Vector, weights: Float[np.ndarray, " k"] | Int[np.ndarray, " k"]) -> Line:
    """Least squares of y on x with weights, as (slope, intercept); one x, or no variation, gives slope 0."""
    share = weights / weights.sum()
    x_mean, y_mean = float(share @ x), float(share @ y)
    variance = float(share @ (x - x_mean) ** 2)
    if variance < 1e-24:
        return 0.0, y_mean
    slope = float(share @ ((x - x_mean) * (y - y_mean))) / variance
    return slope, y_mean - slope * x_mean


def _huber(x: Vector, y: Vector, *, alpha: float = 0.0, tol: float = 1e-9) -> Line:
    from sklearn.linear_model import HuberRegressor  # a slow import that only calibration needs

    # No ridge penalty: it would pull the slope towards 0, and the problem is well-conditioned by now.
    model = HuberRegressor(alpha=alpha, max_iter=1000, tol=tol).fit(x[:, None], y)
    return float(model.coef_[0]), float(model.intercept_)


def _evaluate(line: Line, x: np.ndarray) -> np.ndarray:
    return line[0] * x + line[1]


def _r2(y: Vector, residuals: Vector) -> float | None:
    total = float(((y - y.mean()) ** 2).sum())
    return 1.0 - float((residuals**2).sum()) / total if total > 1e-24 * max(1.0, float((y**2).sum())) else None


_REGRESSIONS: dict[Regression, Callable[..., Line]] = {
    "huber": lambda x, y, _: robust_line(x, y),
    "weighted": weighted_line,
}
_LINKS: dict[Link, tuple[Callable, Callable]] = {"linear": (np.asarray, np.asarray), "log": (np.log, np.exp)}
