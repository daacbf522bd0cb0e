"""How much the gradient differs between micro-batches, measured on a fixed sample of its coordinates."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from segrew import processes

COORDINATES = 64  # of each weight


def sampled_coordinates(parameters: list[nn.Parameter], seed: int = 0) -> list[Tensor]:
    """Draw places in each weight, the same ones for the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(p.numel(), (min(COORDINATES, p.numel()),), generator=generator).to(p.device) for p in parameters
    ]


def relative_variance(gradients: Float[Tensor, "k c"], shares: Float[Tensor, " k"]) -> Float[Tensor, ""]:
    """Σ_k w_k |g_k − ḡ|² / |ḡ|² with ḡ = Σ_k w_k g_k: the noise of one micro-batch beside the signal."""
    shares = shares / shares.sum()
    mean = (shares[:, None] * gradients).sum(0)
    variance = (shares * (gradients - mean).square().sum(1)).sum()
    return variance / mean.square().sum().clamp(min=torch.finfo(mean.dtype).tiny)


class GradientNoise:
    """Watches an accumulating gradient."""

    def __init__(self, module: nn.Module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.places = sampled_coordinates(self.parameters)
        self.found: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Close the mini-batch before, whose micro-batches may lie on several processes, and start another."""
        found = [(torch.stack(self.gradients), torch.stack(self.shares))] if self.gradients else []
        everyones = processes.gather_list(found)
        if sum(len(shares) for _, shares in everyones) > 1:
            gradients, shares = (torch.cat(parts) for parts in zip(*everyones, strict=True))
            self.found.append(relative_variance(gradients / shares[:, None], shares))
        self.gradients = []
        self.shares: list[Tensor] = []
        self.total: Tensor | None = None

    def observe(self, share: Float[Tensor, ""]) -> None:
        """Note what the newest micro-batch, `share` of the mini-batch's tokens, has added to the gradient."""
        pairs = [(p.grad, at) for p, at in zip(self.parameters, self.places, strict=True) if p.grad is not None]
        if not pairs:
            return
        total = torch.cat([grad.flatten()[at].float() for grad, at in pairs])
        self.gradients.append(total if self.total is None else total - self.total)
        self.shares.append(share.clamp(min=torch.finfo(torch.float32).tiny))
        self.total = total

    def metrics(self) -> dict[str, Tensor]:
        """Mean over mini-batches of at least two micro-batches; {} if there was none: one says nothing of variance."""
        self.begin()
        return {"gradient/relative_variance": torch.stack(self.found).mean()} if self.found else {}
