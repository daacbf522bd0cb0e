"""What a PPO step tells: metrics, warnings, evaluations."""

import resource
import sys
import warnings
from typing import Any

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from policy.evaluate import evaluate_policy
from policy.experience import Experience
from policy.losses import kl_estimates
from policy.ppo_run import Run
from policy.rollout import Rollout
from policy.scoring import Scores, Units
from reward_models.drift import drift_metrics, drift_moments, drift_warning
from segrew.masking import masked_mean

LOW_KL = -0.1


def measure(
    run: Run, rollout: Rollout, units: Units, scores: Scores, experience: Experience, stats: dict[str, Tensor]
) -> dict[str, int | float]:
    """The metrics of one step, means over all processes.

    KL and entropy are means over tokens; `dense_sum` is a response's token rewards without the KL part, in total;
    `l2` is the norm over a response's tokens, before whitening; `units` are those of the reward. Where a rule parses,
    `parse_fallback_rate` is the share of responses that it could not be applied to.
    """
    mask = rollout.mask
    k1, k2, k3 = kl_estimates(rollout.logprobs, units.ref_logprobs)
    tokens, rows = mask.sum(), len(rollout.texts)
    dense = (experience.token_rewards + run.config.kl_coef * k1).masked_fill(~mask, 0.0)
    values = {
        "reward/score": scores.scores.mean(),
        "reward/dense_sum": dense.sum(1).mean(),
        "kl/k1": masked_mean(k1, mask),
        "kl/k2": masked_mean(k2, mask),
        "kl/k3": masked_mean(k3, mask),
        "policy/entropy": masked_mean(rollout.entropy, mask),
        "value/explained_variance": explained_variance(rollout.values, experience.returns, mask),
        "advantage/l2": experience.advantages.square().sum(1).sqrt().mean(),
        "return/l2": experience.returns.square().sum(1).sqrt().mean(),
        "units/count": units.rewards.counts.float().mean(),
        "units/length": tokens / units.rewards.counts.sum(),
        "response/length": tokens / rows,
        "response/eos_rate": rollout.ended.float().mean(),
        **stats,
    }
    unparsed = [cut.fallback for cut in (units.own, units.readings, units.actions) if cut.fallback is not None]
    if unparsed:
        values["units/parse_fallback_rate"] = torch.stack(unparsed).any(0).float().mean()
    names = sorted(values)
    means: Any = run.accelerator.reduce(torch.stack([values[n].float() for n in names]), reduction="mean")
    metrics = dict(zip(names, means.tolist(), strict=True))
    metrics |= measure_drift(run, units, scores)
    metrics |= {f"time/{name}": seconds for name, seconds in run.seconds.items()}
    everyones = metrics["response/length"] * rows * run.accelerator.num_processes
    metrics["tokens_per_second"] = everyones / sum(run.seconds.values())
    return metrics | {"memory/peak_mb": peak_memory_mb(run.accelerator.device)}


def measure_drift(run: Run, units: Units, scores: Scores) -> dict[str, float]:
    """How far normalized rewards are from those that the normalizer was fitted on; {} without one. Warns once."""
    if run.axes.normalizer is None:
        return {}
    locations = run.axes.normalizer.locations(units.rewards)
    moments: Any = run.accelerator.reduce(drift_moments(scores.rewards, locations), reduction="sum")
    drifted = drift_warning(moments)
    if drifted and not run.drift_reported:
        run.drift_reported = True
        warnings.warn(drifted, stacklevel=2)
    return drift_metrics(moments)


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


def report(run: Run, metrics: dict[str, int | float]) -> None:
    """Append the metrics, pass them to trackers, and warn of a KL that cannot be."""
    if run.accelerator.is_main_process:
        run.directory.append("metrics.jsonl", metrics)
    run.accelerator.log(metrics, step=int(metrics["step"]))
    run.low_kl_steps = run.low_kl_steps + 1 if metrics["kl/k1"] < LOW_KL else 0
    if run.low_kl_steps == 2:
        warnings.warn(
            f"the mean KL estimate k1 was below {LOW_KL} at steps {metrics['step'] - 1:.0f} and {metrics['step']:.0f}. "
            "One estimate may be negative, a lasting mean may not: the log-probabilities do not describe the "
            "samples (another temperature, padding or template?).",
            stacklevel=2,
        )


def evaluate(run: Run, step: int) -> dict[str, int | float]:
    """Answer the evaluation prompts and score the answers; {} without such prompts."""
    if not run.eval_prompts:
        return {}
    accelerator, roles, config = run.accelerator, run.roles, run.config
    run.show("evaluation")
    own = run.eval_prompts[accelerator.process_index :: accelerator.num_processes]
    with accelerator.autocast():
        evaluation = evaluate_policy(
            roles.policy.model,
            roles.chat,
            roles.reward_model,
            [prompt.messages for prompt in own],
            config.sampling,
            templates=[prompt.template for prompt in own],
            seed=config.seed,
            statistics=lambda part: roles.segmenter_statistics(part, batch_size=len(part)),
        )
    lines = [
        {
            "step": step,
            "split": "eval",
            "prompt": prompt.messages[-1]["content"],
            "response": "".join(segment.text for segment in record.segments),
            "score": record.score,
            "segments": [vars(segment) for segment in record.segments],
        }
        for prompt, record in zip(own, evaluation.scored, strict=True)
    ]
    lines = gather_object(lines)
    scores = [line["score"] for line in lines]
    mean = sum(scores) / len(scores)
    if accelerator.is_main_process:
        run.directory.append("evaluation.jsonl", {"step": step, "score": mean, "scores": scores})
        for line in lines[: config.samples_per_step]:
            run.directory.append("samples.jsonl", line)
    return {"eval/score": mean}
