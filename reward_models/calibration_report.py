"""What `segrew calibrate` prints and draws of a fit."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from reward_models.length_bias import describe_length_bias
from reward_models.normalizers import LocationNormalizer

_LOCATION_LABELS = {"unit": "location p = unit / units", "token": "location p = share of tokens"}


def print_fit(normalizer: LocationNormalizer, record: dict[str, Any], console: Console) -> None:
    """Print both lines, the scalars beside them, score against length, and residuals by location."""
    low, high = normalizer.fitted_range or (0.0, 1.0)
    r2 = {key: "n/a" if value is None else f"{value:.3f}" for key, value in normalizer.r2.items()}
    console.print(
        f"{record['units']} unit rewards of {record['responses']} responses, locations {low:.4f} to {high:.2f}"
    )
    lines = normalizer.with_mode("location")
    mean, spread = lines.formulas
    floor = "" if lines.std_floor is None else f", never below {lines.std_floor:.4f}"
    console.print(f"Mean(p) = {mean}   R² {r2['mean']}")
    console.print(f"Std(p)  = {spread}{floor}   R² {r2['std']}   ({normalizer.regression} regression)")
    for name in ("global", "last"):
        if name in normalizer.modes:
            scalar = normalizer.with_mode(name)
            console.print(f"{name:6}  mean {scalar.mean(1.0):+.4f}, std {scalar.std(1.0):.4f}")
    console.print(f"In force: {normalizer.mode}")
    console.print(describe_length_bias(record["length_bias"]))
    bins, step = normalizer.bins, max(1, len(normalizer.bins) // 8)
    shown = [point for k, point in enumerate(bins) if k % step == 0 or k == len(bins) - 1]
    title = "Fit by location" + (f", {len(shown)} of {len(bins)} bins: one in {step}, and the last" if step > 1 else "")
    table = Table("location", "units", "mean", "residual", "std", "residual", title=title)
    for point in shown:
        table.add_row(
            f"{point.location:.3f}",
            str(point.count),
            f"{point.mean:+.3f}",
            f"{point.mean_residual:+.3f}",
            f"{point.std:.3f}",
            f"{point.std_residual:+.3f}",
        )
    console.print(table)


def plot_fit(normalizer: LocationNormalizer, path: Path) -> None:
    """Draw binned means and spreads against location with the fitted curves, and the residuals below them."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    lines = normalizer.with_mode("location")
    places = [point.location for point in lines.bins]
    curve = [p / 200 for p in range(max(1, int(200 * min(places))), 201)]
    for name, fitted, marker in (("mean", lines.mean, "o"), ("std", lines.std, "^")):
        (line,) = above.plot(curve, [float(fitted(p)) for p in curve], label=f"{name}(p), fitted")
        marks: dict[str, Any] = {"marker": marker, "ls": "", "color": line.get_color(), "ms": 3, "alpha": 0.6}
        above.plot(places, [getattr(point, name) for point in lines.bins], label=f"{name}, binned", **marks)
        spreads = [lines.std(max(point.location, 1e-10)) for point in lines.bins]
        residuals = [getattr(point, f"{name}_residual") for point in lines.bins]
        below.plot(places, [r / s for r, s in zip(residuals, spreads, strict=True)], **marks)
    above.set(ylabel="reward", title=f"Rewards by location, {normalizer.rule}")
    above.legend()
    below.axhline(0, color="grey", lw=0.8)
    below.set(xlabel=_LOCATION_LABELS[normalizer.location_by], ylabel="residual, in std(p)")
    figure.savefig(path)
