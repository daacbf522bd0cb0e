"""How far the rewards of a run have moved from those that its normalizer was fitted on.

Normalized rewards have mean 0 and spread 1 at every location on the calibration set. A policy that writes other
text, or learns to please the reward model, moves them; then dense rewards pay for the place in a response again.
"""

import torch
from jaxtyping import Float
from torch import Tensor

PLACES = ("early", "middle", "late")  # thirds of the location p
FAR = 4.0
_LIMITS = {"mean": 1.0, "spread": 3.0, "far": 0.05}


def drift_moments(normalized: Float[Tensor, "b s"], locations: Float[Tensor, "b s"]) -> Float[Tensor, "4 4"]:
    """Sums from which `drift_metrics` are made; those of several batches or processes add up.

    Args:
        locations: of each unit, in (0, 1]; 0 marks padding.

    Returns:
        A row for each third of the locations and one for all units: Σ1, Σz, Σz², Σ[|z| > 4].
    """
    z = torch.where(locations > 0, normalized, 0.0)
    terms = torch.stack([torch.ones_like(z), z, z.square(), (z.abs() > FAR).to(z.dtype)])
    edges = torch.arange(len(PLACES) + 1, device=z.device) / len(PLACES)
    inside = (locations[None] > edges[:-1, None, None]) & (locations[None] <= edges[1:, None, None])
    inside = torch.cat([inside, (locations > 0)[None]])
    return torch.einsum("mbs,pbs->pm", terms, inside.to(z.dtype))


def drift_metrics(moments: Float[Tensor, "4 4"]) -> dict[str, float]:
    """Mean and spread of normalized rewards, over all units and by third, and the share beyond ±4.

    On the calibration set `mean` is 0 and `spread` 1 everywhere. A third with fewer than two units has no entry.
    """
    return _metrics(moments, enough=2)


def drift_warning(moments: Float[Tensor, "4 4"]) -> str | None:
    """Say what is far from the fit: a mean beyond ±1, a spread beyond 3 or below 1/3, over 5 % of rewards beyond ±4.

    Where fewer than 20 units are, nothing is said.
    """

    def is_far(name: str, value: float) -> bool:
        kind = name.removeprefix("drift/").partition("_")[0]
        return abs(value) > _LIMITS[kind] or (kind == "spread" and value < 1 / _LIMITS[kind])

    far = [f"{name} {value:.2f}" for name, value in _metrics(moments, enough=20).items() if is_far(name, value)]
    if not far:
        return None
    return (
        f"normalized rewards have left the range that the normalizer was fitted on ({', '.join(far)}; means 0 and "
        "spreads 1 there): the answers differ from the calibration set, so a place in a response is paid for again. "
        "Run `segrew calibrate` on answers of this policy, raise --kl_coef, or stop earlier."
    )


def _metrics(moments: Tensor, enough: int) -> dict[str, float]:
    metrics = {}
    for place, (count, total, squares, far) in zip((*PLACES, ""), moments.double().tolist(), strict=True):
        if count >= enough:
            mean, ending = total / count, f"_{place}" if place else ""
            metrics[f"drift/mean{ending}"] = mean
            metrics[f"drift/spread{ending}"] = max(squares / count - mean * mean, 0.0) ** 0.5
            if not place:
                metrics["drift/far"] = far / count
    return metrics
