"""Every core function on a device, in float32, beside float64 on the CPU; part of gpu_check.py."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from gpu_outcome import Outcome
from torch import Tensor

from policy.losses import kl_estimates, policy_loss, value_loss
from policy.reward_shaping import spread_rewards
from reward_models.losses import preference_loss
from reward_models.normalizers import LocationNormalizer
from segrew import segmentation as rules
from segrew.advantages import generalized_advantages, leave_one_out, macro_advantages
from segrew.aggregation import aggregate
from segrew.conversations import Conversations, response_states
from segrew.macro_actions import spread_to_tokens, sum_by_unit, value_by_unit
from segrew.masking import masked_mean, masked_whiten
from segrew.token_statistics import token_statistics

TOLERANCE = 2e-4
ROWS, WIDTH, VOCABULARY, HIDDEN = 32, 512, 4096, 128
PHI = LocationNormalizer.from_parameters(0.7668, 0.2569, 0.4705, 2.8339)


@dataclass
class Inputs:
    """One random batch, on one device in one precision."""

    mask: Tensor
    ended: Tensor
    entropy: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rewards: Tensor
    values: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @classmethod
    def draw(cls) -> "Inputs":
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(0, WIDTH + 1, (ROWS,), generator=g)
        old = -3 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64)
        return cls(
            mask=torch.arange(WIDTH) < lengths[:, None],
            ended=torch.rand(ROWS, generator=g) > 0.5,
            entropy=4 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64).float().double(),
            logprobs=(old + 0.1 * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)).float().double(),
            old_logprobs=old.float().double(),
            rewards=torch.randn(ROWS, WIDTH, generator=g).double(),
            values=torch.randn(ROWS, WIDTH, generator=g).double(),
            hidden=torch.randn(256, HIDDEN, generator=g).double(),
            weight=(torch.randn(VOCABULARY, HIDDEN, generator=g) * HIDDEN**-0.5).double(),
            targets=torch.randint(VOCABULARY, (256,), generator=g),
        )

    def to(self, device: torch.device) -> "Inputs":
        moved = {name: value.to(device) for name, value in vars(self).items()}
        return Inputs(**{name: v.float() if v.is_floating_point() else v for name, v in moved.items()})

    def units(self) -> rules.Segmentation:
        return rules.join_stop(rules.segment_by_entropy(self.entropy, self.mask, threshold=3.0), self.ended)

    def unit_rewards(self) -> Tensor:
        units = self.units()
        return self.rewards.gather(1, units.ends).masked_fill(~units.unit_mask, 0.0)


def _losses(x: Inputs, ratio: str) -> list[Tensor]:
    units = x.units()
    advantages, returns = macro_advantages(x.rewards, x.values, units, gamma=1.0, lambda_=0.95)
    logprobs = x.logprobs.detach().requires_grad_()
    loss, _ = policy_loss(logprobs, x.old_logprobs, advantages, units, ratio=ratio)  # type: ignore[arg-type]
    value, _ = value_loss(x.values + 0.1, x.values, returns, x.mask, clip=0.2)
    loss.backward()
    assert logprobs.grad is not None
    return [loss.detach(), value, logprobs.grad]


def _statistics(x: Inputs) -> list[Tensor]:
    hidden = x.hidden.detach().requires_grad_()
    logprobs, entropy = token_statistics(hidden, x.weight, x.targets, temperature=0.8, softcap=30.0)
    logprobs.sum().backward()
    assert hidden.grad is not None
    return [logprobs.detach(), entropy, hidden.grad]


def _in_chunks(x: Inputs) -> list[Tensor]:
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_()
    found = []
    for learns in (False, True):
        logprobs, entropy = token_statistics(hidden, weight if learns else x.weight, x.targets, chunk_size=48)
        hidden.grad = None
        (logprobs * x.values[0, :256]).sum().backward()
        found += [logprobs.detach(), entropy, hidden.grad]
    return [*found, weight.grad]


def _learning_statistics(x: Inputs) -> list[Tensor]:
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_()
    logprobs, entropy = token_statistics(hidden, weight, x.targets, bias=x.weight[:, 0], entropy_temperature=1.5)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy, hidden.grad, weight.grad]


def _packed_rows(x: Inputs, family: str) -> list[Tensor]:
    """Hidden states of rows that share prompts, and the gradient to the embeddings; on CUDA by FlexAttention."""
    torch.manual_seed(0)
    window = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, attn_logit_softcapping=5.0, **(window if family == "Gemma2" else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(x.hidden)
    tokens = (x.targets % 256).tolist()
    prompts = [tokens[:150], tokens[:30], tokens[:150], tokens[:150]]
    rows = Conversations(prompts, [tokens[:90], tokens[:40], tokens[90:250], []], torch.zeros(4, dtype=torch.bool))
    states = response_states(model, rows, layout="packed")
    (states.at.square().mean() + states.before.sum(-1).mean()).backward()
    return [states.at.detach(), states.before.detach(), model.get_input_embeddings().weight.grad]


CHECKS: dict[str, Callable[[Inputs], list[Tensor]]] = {
    "segment_by_entropy": lambda x: [x.units().ids],
    "segment_by_ngram": lambda x: [rules.segment_by_ngram(x.mask, 5).ids],
    "segment_by_perplexity": lambda x: [rules.segment_by_perplexity(x.logprobs, x.mask).ids],
    "segment_by_ngram, a length per row": lambda x: [rules.segment_by_ngram(x.mask, x.mask.sum(1) % 7 + 1).ids],
    "segment_by_random_ngram": lambda x: [
        rules.segment_by_random_ngram(
            x.mask, when_exhausted="reshuffle", generator=torch.Generator().manual_seed(0)
        ).ids
    ],
    "segment_by_boundaries": lambda x: [rules.segment_by_boundaries(x.entropy > 3.0, x.mask).ids],
    "segment_by_spans": lambda x: [
        rules.segment_by_spans(
            [[(0, n // 2), (n // 2, n)] if n > 1 else [] for n in x.mask.sum(1).tolist()], x.mask
        ).ids
    ],
    "segment_by_token, by_response": lambda x: [
        rules.segment_by_token(x.mask).ids,
        rules.segment_by_response(x.mask).ids,
    ],
    "starts, ends, lengths, locations": lambda x: [
        getattr(x.units(), name)[:, :50] for name in ("starts", "ends", "lengths", "locations")
    ],
    "read_columns": lambda x: [rules.read_columns(x.units(), x.ended, "content")[:, :50]],
    "sum_by_unit, spread_to_tokens": lambda x: [spread_to_tokens(sum_by_unit(x.rewards, x.units()), x.units())],
    **{
        f"value_by_unit {scheme}": lambda x, scheme=scheme: [
            spread_to_tokens(value_by_unit(x.values, x.units(), scheme=scheme), x.units())
        ]
        for scheme in ("mean", "last", "decayed", "first")
    },
    **{
        f"aggregate {kind}": lambda x, kind=kind: [aggregate(x.unit_rewards(), x.units().unit_mask, kind=kind)]
        for kind in ("mean", "sum", "softmax", "softmin", "log_mean_exp", "softmax_weighted", "max", "min", "last")
    },
    "aggregate learned": lambda x: [
        aggregate(x.unit_rewards(), x.units().unit_mask, kind="learned", weights=x.unit_rewards().sigmoid())
    ],
    "normalize, spread_rewards": lambda x: [
        spread_rewards(PHI.transform(x.unit_rewards(), x.units().locations), x.units(), how="even")
    ],
    "generalized_advantages": lambda x: list(
        generalized_advantages(x.rewards, x.values, x.mask, gamma=0.99, lambda_=0.95)
    ),
    "generalized_advantages, γ and λ per position": lambda x: list(
        generalized_advantages(
            x.rewards, x.values, x.mask, gamma=x.values.sigmoid(), lambda_=x.rewards.sigmoid(), bootstrap=x.values[:, 0]
        )
    ),
    "macro_advantages": lambda x: list(macro_advantages(x.rewards, x.values, x.units(), gamma=0.99, lambda_=0.95)),
    "macro_advantages, γ and λ per token": lambda x: list(
        macro_advantages(
            x.rewards, x.values, x.units(), gamma=0.99, lambda_=0.95, gamma_scale="token", lambda_scale="token"
        )
    ),
    "masked_mean, masked_whiten": lambda x: [masked_mean(x.rewards, x.mask), masked_whiten(x.rewards, x.mask)],
    "leave_one_out": lambda x: [leave_one_out(x.rewards[:, 0], 4)],
    "preference_loss": lambda x: [preference_loss(x.rewards[:, 0], x.rewards[:, 1])],
    "kl_estimates": lambda x: list(kl_estimates(x.logprobs, x.old_logprobs)),
    **{f"losses, {ratio} ratio": lambda x, ratio=ratio: _losses(x, ratio) for ratio in ("token", "joint", "geometric")},
    "token_statistics and gradient": _statistics,
    "token_statistics of a head that learns": _learning_statistics,
    "token_statistics in chunks": _in_chunks,
    "normalizer modes": lambda x: [
        LocationNormalizer.from_parameters(0.3, 0.1, 0.2, 1.5).transform(x.unit_rewards(), x.units().locations),
        PHI.mean(x.units().locations.clamp(min=1e-3))[:, :50],
        PHI.std(x.units().locations.clamp(min=1e-3))[:, :50],
    ],
    "packed rows, states and gradient": lambda x: _packed_rows(x, "Llama"),
    "packed rows, a sliding layer and soft-capping": lambda x: _packed_rows(x, "Gemma2"),
}


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference, relative where values exceed 1."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        width = min(a.shape[-1], b.shape[-1]) if a.dim() else None
        a, b = (x.detach().double().cpu()[..., :width] if width else x.detach().double().cpu() for x in (a, b))
        worst = max(worst, float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0)
    return worst


def hot_path(x: Inputs) -> None:
    """Everything between scored units and the losses."""
    units = x.units()
    rewards = spread_rewards(PHI.transform(x.unit_rewards(), units.locations), units, how="even")
    advantages, returns = macro_advantages(rewards, x.values, units, gamma=1.0, lambda_=0.95)
    policy_loss(x.logprobs, x.old_logprobs, masked_whiten(advantages, x.mask), units)
    value_loss(x.values, x.values, returns, x.mask, clip=0.2)


def agreement(check: Callable[[Inputs], list[Tensor]], device: torch.device) -> Outcome:
    """float32 on the device against float64 on the CPU."""
    exact = Inputs.draw()
    gap = largest_difference(check(exact.to(device)), check(exact))
    return Outcome(gap <= TOLERANCE, f"largest difference {gap:.1e}", {"difference": gap})


def repeats_itself(device: torch.device) -> Outcome:
    """Every check twice with deterministic algorithms on, bit for bit."""
    x = Inputs.draw().to(device)
    differing = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name, check in CHECKS.items():
                twice = zip(check(x), check(x), strict=True)
                differing += [name] * (not all(torch.equal(a, b) for a, b in twice))
    finally:
        torch.use_deterministic_algorithms(False)
    unsure = {str(one.message).split(" ")[0] for one in caught if "deterministic" in str(one.message)}
    says = f"differ: {', '.join(differing)}" if differing else f"{len(CHECKS)} checks, equal twice"
    return Outcome(not differing, says + (f" (not promised by torch: {', '.join(sorted(unsure))})" if unsure else ""))


def waits_for_nothing(device: torch.device) -> Outcome:
    """The maths between scored units and the losses, and token statistics with their gradient, wait for no device."""
    x = Inputs.draw().to(device)
    hot_path(x)
    _statistics(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
    try:
        hot_path(x)
        _statistics(x)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return Outcome(True, "none on the hot path" if device.type == "cuda" else "ran; only CUDA can tell")


def parity_checks(device: torch.device) -> dict[str, Callable[[], Outcome]]:
    """Values, determinism, synchronisation."""
    named = {name: partial(agreement, check, device) for name, check in CHECKS.items()}
    return named | {"deterministic mode": partial(repeats_itself, device),
                    "hidden synchronisation": partial(waits_for_nothing, device)}  # fmt: skip
