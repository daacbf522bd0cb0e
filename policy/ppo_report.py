"""What a PPO step tells: metrics, and warnings of what cannot be."""

import resource
import sys

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policy.agreement import live_agreement
from policy.experience import Experience
from policy.losses import kl_estimates
from policy.monitors import flat_groups, flat_warning
from policy.ppo_run import Run
from policy.readings import Scores
from policy.rollout import Rollout
from policy.text_metrics import text_metrics
from reward_models.drift import drift_metrics, drift_moments, drift_warning
from segrew import processes
from segrew.masking import masked_mean

LOW_KL = -0.1
LARGEST_GAP = 0.1


def measure(
    run: Run, rollout: Rollout, experience: Experience, scores: Scores, stats: dict[str, Tensor]
) -> dict[str, int | float]:
    """The metrics of one step.

    Where a rule parses, `parse_fallback_rate` is the share of responses that it could not be applied to.
    """
    values = (
        kl_metrics(rollout, experience) | reward_metrics(run, experience, scores) | unit_metrics(experience, scores)
    )
    mask = rollout.mask
    texts = run.roles.chat.response_texts(rollout.conversations.responses)
    values |= live_agreement(rollout, experience.units, texts, run.config.temperature)
    values |= {
        "policy/entropy": masked_mean(rollout.entropy, mask),
        "value/explained_variance": explained_variance(
            rollout.values, experience.returns, experience.units.actions.mask
        ),
        "response/length": mask.sum() / len(mask),
        "response/eos_rate": rollout.ended.float().mean(),
        **{f"response/{n}": torch.tensor(x) for n, x in text_metrics(rollout.conversations.responses).items()},
        **stats,
    }
    if rollout.logprob_gap is not None:
        values["rollout/logprob_gap"] = masked_mean(rollout.logprob_gap, mask)
    unparsed = [cut.fallback for cut in experience.units.cuts.values() if cut.fallback is not None]
    if unparsed:
        values["units/parse_fallback_rate"] = torch.stack(unparsed).any(0).float().mean()
    names, device = sorted(values), mask.device
    found = torch.stack([values[name].float().to(device) for name in names])
    metrics = dict(zip(names, found.tolist(), strict=True))
    metrics |= measure_drift(run, scores)
    run.state.bad_rows += int(metrics["reward/bad_rows"])
    metrics |= {"kl/coef": run.state.kl_coef, "policy/skipped_updates": run.state.skipped_updates}
    metrics |= {f"time/{name}": seconds for name, seconds in run.seconds.items()}
    metrics["tokens_per_second"] = sum(rollout.conversations.lengths) / sum(run.seconds.values())
    return metrics | {"memory/peak_mb": max(processes.gather(peak_memory_mb(run.accelerator.device)))}


def kl_metrics(rollout: Rollout, experience: Experience) -> dict[str, Tensor]:
    """Means over tokens of the three estimates; `answer` is the mean over answers of the sum of k1."""
    k1, k2, k3 = kl_estimates(rollout.logprobs, experience.units.ref_logprobs)
    means = {name: masked_mean(k, rollout.mask) for name, k in (("kl/k1", k1), ("kl/k2", k2), ("kl/k3", k3))}
    return means | {"kl/answer": k1.masked_fill(~rollout.mask, 0.0).sum(1).mean()}


def reward_metrics(run: Run, experience: Experience, scores: Scores) -> dict[str, Tensor]:
    """Scores of the answers that have one; `dense_sum` is an answer's token rewards without the KL part, in total.

    `flat_prompts` is the share of prompts whose answers all score alike. `l2` is the norm over an answer's tokens,
    before whitening.
    """
    rows, taking_part = ~scores.bad, experience.units.actions.mask.any(1)
    values = {
        "reward/score": masked_mean(scores.scores, rows),
        "reward/dense_sum": masked_mean(experience.dense.sum(1), taking_part),
        "reward/bad_rows": scores.bad.float().sum(),
        "reward/flat_prompts": flat_groups(scores.scores, run.config.num_samples_per_prompt, rows),
        "advantage/l2": masked_mean(experience.advantages.square().sum(1).sqrt(), taking_part),
        "return/l2": masked_mean(experience.returns.square().sum(1).sqrt(), taking_part),
    }
    if len(scores.readings) > 1:
        values |= {f"reward/{r.source}": masked_mean(r.scores, rows) for r in scores.readings}
    return values


def unit_metrics(experience: Experience, scores: Scores) -> dict[str, Tensor]:
    """Mean number and length of the first source's reward units, and of the actions of answers that take part."""
    units, actions = scores.readings[0].segmentation, experience.units.actions
    rows = actions.mask.any(1).sum().clamp(min=1)
    return {
        "units/count": units.counts.float().mean(),
        "units/length": units.mask.sum() / units.counts.sum().clamp(min=1),
        "actions/count": actions.counts.sum() / rows,
        "actions/length": actions.mask.sum() / actions.counts.sum().clamp(min=1),
    }


def measure_drift(run: Run, scores: Scores) -> dict[str, float]:
    """How far the first normalized source is from what its normalizer was fitted on; {} without one. Warns once."""
    for source, reading in zip(run.sources, scores.readings, strict=True):
        if source.normalizer is not None:
            locations = source.normalizer.locations(reading.segmentation).masked_fill(scores.bad[:, None], 0.0)
            moments = drift_moments(reading.rewards, locations)
            run.warn_once("drift", drift_warning(moments))
            return drift_metrics(moments)
    return {}


def explained_variance(
    values: Float[Tensor, "b t"], returns: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """1 − Var(G − V) / Var(G) over real tokens; 0 where all returns are equal."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    total = variance(returns)
    return torch.where(total > 0, 1 - variance(returns - values) / total.clamp(min=1e-12), 0.0)


def peak_memory_mb(device: torch.device) -> float:
    """The most that was allocated on the accelerator, or resident in this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def engine_warning(metrics: dict[str, int | float]) -> str | None:
    """What to say where the engine that drew the answers is not the policy."""
    gap = metrics.get("rollout/logprob_gap", 0.0)
    if gap <= LARGEST_GAP:
        return None
    return (
        f"the engine's log-probabilities are {gap:.2f} nats a token off the policy's own: it draws from another "
        "distribution (weights that it does not load, or another precision or attention). The update counts with the "
        "policy's own; if the gap lasts, take --generation_engine transformers."
    )


def report(run: Run, metrics: dict[str, int | float]) -> None:
    """Append the metrics, pass them to trackers, and warn of a KL that cannot be and of rewards that teach nothing."""
    if processes.is_main():
        run.directory.append("metrics.jsonl", metrics)
    run.accelerator.log(metrics, step=int(metrics["step"]))
    run.state.low_kl_steps = run.state.low_kl_steps + 1 if metrics["kl/k1"] < LOW_KL else 0
    run.warn_once("engine", engine_warning(metrics))
    run.warn_once("flat", flat_warning(metrics["reward/flat_prompts"], run.config.num_samples_per_prompt))
    if run.state.low_kl_steps == 2:
        run.warn_once(
            "kl",
            f"the mean KL estimate k1 was below {LOW_KL} at steps {metrics['step'] - 1:.0f} and {metrics['step']:.0f}. "
            "One estimate may be negative, a lasting mean may not: the log-probabilities do not describe the "
            "samples (another temperature, padding or template?).",
        )
