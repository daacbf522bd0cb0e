"""The normalizers released with 2501.02790, by backbone and cut-off."""

from typing import NamedTuple


class Preset(NamedTuple):
    """Parameters of a released normalizer, for rewards read under `rule` (the label of a segmentation)."""

    rule: str
    w_mu: float
    w_sigma: float
    b_mu: float
    b_sigma: float


def _bandit(mean: float, std: float) -> Preset:
    return Preset("response", 0.0, 0.0, mean, std)


# Token level is threshold 0 in that code. Phi-3-mini-instruct, Llama-3-8B-SFT (RLHFlow), Llama-3.1-8B-Instruct.
PRESETS = {
    "phi3-mini-1.75": Preset("entropy>1.75", 0.7668, 0.2569, 0.4705, 2.8339),
    "phi3-mini-2.0": Preset("entropy>2", 0.7209, 0.2330, 0.6055, 2.6555),
    "phi3-mini-token": Preset("entropy>0", 0.9628, 0.3796, 1.2917, 3.5006),
    "phi3-mini-bandit": _bandit(-0.51953125, 2.15625),
    "llama3-sft-2.0": Preset("entropy>2", 0.8967, 0.5680, 0.8572, 4.1667),
    "llama3-sft-token": Preset("entropy>0", 1.7340, 0.9906, 1.3212, 5.4513),
    "llama3-sft-bandit": _bandit(-0.81640625, 2.953125),
    "llama3.1-instruct-2.0": Preset("entropy>2", 0.8345, 0.4780, 0.8798, 3.7358),
    "llama3.1-instruct-token": Preset("entropy>0", 1.6268, 0.6254, 0.6419, 4.9217),
    "llama3.1-instruct-bandit": _bandit(-0.828125, 2.9375),
}
