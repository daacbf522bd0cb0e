"""The optimizer steps of one batch of rollouts: losses, early stop of the inner epochs, gradients that are checked."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from policy.experience import Experience
from policy.gradient_noise import GradientNoise
from policy.kl_control import charged_kl, scaled_kl
from policy.losses import policy_loss, value_loss
from policy.minibatches import micro_batches_of, mini_batches
from policy.ppo_config import PPOConfig
from policy.ppo_run import Run
from policy.rollout import Rollout
from policy.scoring import take
from segrew import processes
from segrew.conversations import runs_padded
from segrew.macro_actions import value_by_unit
from segrew.segmentation import Segmentation

Stats = dict[str, Tensor]
# Sums over the micro-batches of a mini-batch; 0 for what a run does not have.
ADDITIVE = ("policy/loss", "policy/kl_loss", "policy/clip_fraction", "policy/approx_kl", "value/loss")
# Means over the mini-batches of a step.
AVERAGED = (*ADDITIVE, "policy/grad_norm", "value/grad_norm")


def update(
    run: Run, rollout: Rollout, experience: Experience, generator: torch.Generator, *, warming_up: bool = False
) -> Stats:
    """Take the optimizer steps of one batch of rollouts; return what the losses report, averaged over them.

    Args:
        warming_up: only the critic learns.

    Raises:
        ValueError: a gradient is not finite, and bad rows are not to be skipped.
    """
    config, accelerator = run.config, run.accelerator
    modules = {"policy": run.policy} | ({} if run.critic is None else {"value": run.critic})
    for module in modules.values():
        module.train(config.gradient_checkpointing)
    noise = GradientNoise(run.policy)
    totals: dict[str, Any] = defaultdict(float)
    largest, seen, taken = torch.zeros((), device=accelerator.device), 0, 0
    for rows in mini_batches(
        len(rollout.texts),
        num_epochs=config.num_ppo_epochs,
        num_mini_batches=config.num_mini_batches,
        generator=generator,
        group=config.num_samples_per_prompt,
    ):
        sizes = batch_sizes(experience.units.actions, rows)
        if not sizes["token"]:
            continue  # no answer of these takes part
        stats, ratio = accumulate(run, rollout, experience, rows, sizes, noise, warming_up=warming_up)
        largest, seen = torch.maximum(largest, ratio), seen + 1
        for name, value in stats.items():
            totals[name] += value
        if too_far(run, stats["policy/approx_kl"], ratio):
            run.optimizer.zero_grad()
            break
        norms = {
            f"{name}/grad_norm": accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)
            for name, module in modules.items()
        }
        if all_finite(norms) or not skips_bad_gradient(run, rollout, experience, rows):
            run.optimizer.step()
            run.scheduler.step()
            taken += 1
            for name, norm in norms.items():
                totals[name] += norm
        run.optimizer.zero_grad()
    return {
        **{name: torch.as_tensor(totals[name]) / max(seen, 1) for name in AVERAGED},
        **noise.metrics(),
        "policy/ratio_max": largest,
        "policy/updates": torch.tensor(float(taken)),
    }


def accumulate(
    run: Run,
    rollout: Rollout,
    experience: Experience,
    rows: list[int],
    sizes: dict[str, float],
    noise: GradientNoise,
    *,
    warming_up: bool,
) -> tuple[Stats, Tensor]:
    """Accumulate the gradient of a mini-batch; return its statistics and its largest ratio.

    Each process takes its share of the micro-batches. Losses are divided by the sizes of the whole mini-batch, so
    that gradients and statistics add up.
    """
    config, tokens_of = run.config, experience.units.actions.mask.sum(1)
    totals: dict[str, Any] = defaultdict(lambda: torch.zeros((), device=run.accelerator.device))
    ratio_max = torch.zeros((), device=run.accelerator.device)
    noise.begin()
    at_most = min(config.per_device_train_batch_size, -(-len(rows) // processes.count()))
    padded = any(runs_padded(model) for model in (run.roles.policy, run.roles.critic) if model is not None)
    parts = micro_batches_of(rows, rollout.conversations, at_most, config.train_tokens_per_batch, padded=padded)
    for part in processes.deal(list(parts)):
        for loss, stats in losses(run, rollout, experience, part, sizes, warming_up=warming_up):
            if loss.requires_grad:
                run.accelerator.backward(loss)
            ratio_max = torch.maximum(ratio_max, stats.pop("policy/ratio_max", ratio_max))
            for name, value in stats.items():
                totals[name] += value
        noise.observe(tokens_of[part].sum() / sizes["token"])
    processes.sum_gradients([p for group in run.optimizer.param_groups for p in group["params"]])
    sums = processes.reduce(torch.stack([totals[name].detach() for name in ADDITIVE]))
    return dict(zip(ADDITIVE, sums, strict=True)), processes.reduce(ratio_max, "max")


def batch_sizes(actions: Segmentation, rows: list[int]) -> dict[str, float]:
    """What the losses of a mini-batch are divided by: its tokens, answers and units."""
    part = actions.select(torch.tensor(rows, device=actions.ids.device))
    sizes = torch.stack([part.mask.sum(), part.mask.any(1).sum(), part.counts.sum()]).float()
    return dict(zip(("token", "sequence", "unit"), sizes.tolist(), strict=True))


def losses(
    run: Run,
    rollout: Rollout,
    experience: Experience,
    rows: list[int],
    sizes: dict[str, float],
    *,
    warming_up: bool = False,
) -> Iterator[tuple[Float[Tensor, ""], Stats]]:
    """Yield the policy's loss of one micro-batch, then the critic's, each with its share of the statistics.

    The critic runs only when the next loss is asked for: taken back one by one, the two graphs are never held at once.
    """
    config, part = run.config, rollout.conversations.select(rows)
    width = max(part.lengths)
    actions = take(experience.units.actions, rows, width)
    with torch.set_grad_enabled(not warming_up):
        logprobs, _ = run.policy(part, temperature=config.temperature)
    loss, stats = surrogate(config, rollout, experience, rows, logprobs, sizes[config.loss_reduction])
    share = actions.mask.sum() / sizes["token"]
    shared = {
        "policy/loss": loss.detach(),
        "policy/clip_fraction": share * stats["clip_fraction"],
        "policy/approx_kl": share * stats["approx_kl"],
        "policy/ratio_max": stats["ratio_max"],
    }
    if config.kl_in == "loss":
        kl = charged_kl(logprobs, experience.units.ref_logprobs[rows, :width], config.kl_estimator)
        charged = run.state.kl_coef * scaled_kl(kl, actions, config.kl_scale).sum() / sizes["token"]
        loss = loss + charged
        shared["policy/kl_loss"] = charged.detach()
    yield loss, shared
    if run.critic is not None:
        on_values = critic_loss(run, rollout, experience, rows, actions, sizes)
        yield config.vf_coef * on_values, {"value/loss": on_values.detach()}


def surrogate(
    config: PPOConfig,
    rollout: Rollout,
    experience: Experience,
    rows: list[int],
    logprobs: Float[Tensor, "b t"],
    normalizer: float | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Policy loss of some rows of a batch, given what the policy says of them now; see `policy_loss`."""
    width = logprobs.shape[1]
    return policy_loss(
        logprobs,
        rollout.logprobs[rows, :width],
        experience.weights[rows, :width],
        take(experience.units.actions, rows, width),
        clip=config.cliprange,
        clip_high=config.cliprange_high,
        dual_clip=config.dual_clip,
        ratio=config.ratio,
        reduction=config.loss_reduction,
        normalizer=normalizer,
    )


def critic_loss(
    run: Run,
    rollout: Rollout,
    experience: Experience,
    rows: list[int],
    actions: Segmentation,
    sizes: dict[str, float],
) -> Float[Tensor, ""]:
    """Value loss over tokens, or over units with each unit's value made of its tokens' as in the advantages."""
    config, width = run.config, actions.ids.shape[1]
    values = run.critic(rollout.conversations.select(rows))
    old, returns, mask = rollout.values[rows, :width], experience.returns[rows, :width], actions.mask
    if config.critic_target == "unit":
        values, old = (value_by_unit(x, actions, scheme=config.value_scheme) for x in (values, old))
        returns, mask = value_by_unit(returns, actions, scheme="first"), actions.unit_mask
    normalizer = sizes[config.critic_target]
    return value_loss(values, old, returns, mask, clip=config.cliprange_value, normalizer=normalizer)[0]


def too_far(run: Run, approx_kl: Tensor, ratio: Tensor) -> bool:
    """Whether the policy has moved so far from the one that sampled that these rollouts are used up."""
    kl_bound, ratio_bound = run.config.target_kl, run.config.ratio_threshold
    if kl_bound is None and ratio_bound is None:
        return False
    kl, largest = torch.stack([approx_kl, ratio]).tolist()
    return (kl_bound is not None and kl > kl_bound) or (ratio_bound is not None and largest > ratio_bound)


def all_finite(norms: dict[str, Any]) -> bool:
    """Whether all gradient norms are finite; waits for the device."""
    return bool(torch.stack([torch.as_tensor(norm) for norm in norms.values()]).isfinite().all())


def skips_bad_gradient(run: Run, rollout: Rollout, experience: Experience, rows: list[int]) -> bool:
    """Count the update as skipped, or stop the run and name the row whose gradient is not finite."""
    if run.config.skip_bad_rows:
        run.state.skipped_updates += 1
        return True
    row = find_bad_row(run, rollout, experience, rows)
    whose = "none of its rows alone shows it" if row is None else f"row {row} of this step, {rollout.texts[row][:60]!r}"
    raise ValueError(
        f"a gradient is NaN or infinite ({whose}); the update was not taken. Lower --learning_rate, look at the row's "
        "reward in samples.jsonl, or pass --skip_bad_rows true to leave out such updates and count them."
    )


def find_bad_row(run: Run, rollout: Rollout, experience: Experience, rows: list[int]) -> int | None:
    """Take the gradient of one row at a time, the same on every process, until one is not finite."""
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    sizes = dict.fromkeys(("token", "sequence", "unit"), 1.0)
    for row in rows:
        run.optimizer.zero_grad()
        for loss, _ in losses(run, rollout, experience, [row], sizes):
            loss.backward()
        if not all(p.grad is None or p.grad.isfinite().all() for p in trained):
            return row
    return None
