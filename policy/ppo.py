"""`segrew ppo`: dense-reward PPO, with any reward granularity and any action granularity in one loop.

A step samples answers, cuts them into units, scores the units, spreads the rewards over tokens, computes
advantages over the action units, and updates policy and critic.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor

from policy.experience import Experience, densify
from policy.losses import policy_loss, value_loss
from policy.minibatches import micro_batches_of, mini_batches, prompt_positions, step_generator
from policy.ppo_config import PPOConfig
from policy.ppo_report import evaluate, measure, report
from policy.ppo_run import Run, finish_run, open_run, save_run
from policy.rollout import Rollout, in_micro_batches, sample_answers
from policy.scoring import Units, cut_units, sample_rows, score_rollout, take
from segrew.config import parse
from segrew.data_options import DataOptions

__all__ = ["PPOConfig", "main", "train_policy"]


def train_policy(config: PPOConfig, options: DataOptions | None = None) -> Path:
    """Train a policy and return its directory.

    Raises:
        ValueError: something in the settings, the files or the rewards is wrong; the message says what to do.
    """
    run, done = open_run(config, options or DataOptions())
    main = run.accelerator.is_main_process
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not main) as progress:
        bar = progress.add_task("PPO", total=config.total_steps, completed=done)
        run.show = lambda text: progress.update(bar, description=f"PPO  {text:24}")
        if done == 0:
            evaluate(run, 0)
        for step in range(done + 1, config.total_steps + 1):
            metrics = train_step(run, step)
            if step % config.eval_steps == 0 or step == config.total_steps:
                metrics |= evaluate(run, step)
            report(run, metrics)
            if config.save_steps and step % config.save_steps == 0:
                save_run(run, step)
            run.show(f"score {metrics['reward/score']:.2f}  KL {metrics['kl/k1']:.4f}")
            progress.advance(bar)
    return finish_run(run)


def train_step(run: Run, step: int) -> dict[str, int | float]:
    """One PPO step: sample, cut, score, densify, advantages, update."""
    config, accelerator = run.config, run.accelerator
    generator = step_generator(config.seed, step, accelerator.process_index)
    positions = prompt_positions(len(run.prompts), step, config.rollout_batch_size, config.seed)
    positions = positions[accelerator.process_index :: accelerator.num_processes]
    with run.clock("rollout"):
        rollout = sample(run, positions, generator)
    with run.clock("segment"), accelerator.autocast():
        units = cut_units(rollout, run.roles, run.axes, config, generator)
    with run.clock("score"), accelerator.autocast():
        scores = score_rollout(rollout, units, run.roles, run.axes, config)
    experience = densify(config, accelerator, rollout, units, scores)
    with run.clock("update"):
        stats = update(run, rollout, units, experience, generator)
    if accelerator.is_main_process:
        shown = [run.prompts[i].messages[-1]["content"] for i in positions[: config.samples_per_step]]
        for line in sample_rows(step, "train", shown, rollout, units, scores, run.roles, run.axes):
            run.directory.append("samples.jsonl", line)
    return {"step": step} | measure(run, rollout, units, scores, experience, stats)


@torch.no_grad()
def sample(run: Run, positions: list[int], generator: torch.Generator) -> Rollout:
    """Draw an answer to each prompt and note what policy and critic say of it before anything moves."""
    config, roles = run.config, run.roles
    policy, critic = roles.policy.eval(), roles.critic.eval()
    prompts = [run.prompt_ids[i] for i in positions]
    with run.accelerator.autocast():
        answers = sample_answers(policy.model, roles.chat, prompts, config.sampling, generator)
        rows = config.local_rollout_forward_batch_size
        read = partial(policy, temperature=config.temperature)
        logprobs, entropy = in_micro_batches(read, answers.conversations, rows)
        (values,) = in_micro_batches(lambda part: (critic(part),), answers.conversations, rows)
    return Rollout(answers.conversations, answers.texts, logprobs, entropy, values)


def update(
    run: Run, rollout: Rollout, units: Units, experience: Experience, generator: torch.Generator
) -> dict[str, Tensor]:
    """Take the optimizer steps of one batch of rollouts; return what the losses report, averaged over them."""
    config, accelerator = run.config, run.accelerator
    trained = (run.policy, run.critic)
    for module in trained:
        module.train(config.gradient_checkpointing)
    totals: dict[str, Any] = defaultdict(float)
    ratio_max, steps = torch.zeros((), device=accelerator.device), 0
    for rows in mini_batches(
        len(rollout.texts),
        num_epochs=config.num_ppo_epochs,
        num_mini_batches=config.num_mini_batches,
        generator=generator,
    ):
        sizes = batch_sizes(accelerator, units, rows)
        for part in micro_batches_of(rows, rollout.conversations, config.per_device_train_batch_size):
            loss, stats, ratio = losses(run, rollout, units, experience, part, sizes)
            accelerator.backward(loss)
            ratio_max = torch.maximum(ratio_max, ratio)
            for name, value in stats.items():
                totals[name] += value
        for module in trained:
            accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
        steps += 1
    return {name: total / steps for name, total in totals.items()} | {"policy/ratio_max": ratio_max}


def batch_sizes(accelerator: Accelerator, units: Units, rows: list[int]) -> dict[str, int | float]:
    """What the losses of a mini-batch are divided by: its mean over processes, as gradients are averaged there."""
    actions = units.actions.select(torch.tensor(rows, device=units.actions.ids.device))
    sizes = torch.stack([actions.mask.sum(), actions.mask.any(1).sum(), actions.counts.sum()]).float()
    means: Any = accelerator.reduce(sizes, reduction="mean")
    return dict(zip(("token", "sequence", "unit"), means.tolist(), strict=True))


def losses(
    run: Run, rollout: Rollout, units: Units, experience: Experience, rows: list[int], sizes: dict[str, float]
) -> tuple[Float[Tensor, ""], dict[str, Tensor], Float[Tensor, ""]]:
    """Loss of one micro-batch, its additive share of the mini-batch's statistics, and its largest ratio."""
    config, part = run.config, rollout.conversations.select(rows)
    width = max(part.lengths)
    old_logprobs, old_values, weights, returns = (
        x[rows, :width] for x in (rollout.logprobs, rollout.values, experience.weights, experience.returns)
    )
    actions = take(units.actions, rows, width)
    logprobs, _ = run.policy(part, temperature=config.temperature)
    on_policy, policy_stats = policy_loss(
        logprobs,
        old_logprobs,
        weights,
        actions,
        clip=config.cliprange,
        ratio=config.ratio,
        reduction=config.loss_reduction,
        normalizer=sizes[config.loss_reduction],
    )
    on_values, _ = value_loss(
        run.critic(part), old_values, returns, actions.mask, clip=config.cliprange_value, normalizer=sizes["token"]
    )
    share = sum(part.lengths) / sizes["token"]
    stats = {
        "policy/loss": on_policy.detach(),
        "policy/clip_fraction": share * policy_stats["clip_fraction"],
        "value/loss": on_values.detach(),
    }
    return on_policy + config.vf_coef * on_values, stats, policy_stats["ratio_max"]


def main(argv: list[str]) -> None:
    """Run `segrew ppo`."""
    config, options = parse("ppo", (PPOConfig, DataOptions), argv)
    path = train_policy(config, options)
    if PartialState().is_main_process:
        Console(stderr=True).print(f"The policy is in {path}; `segrew report {path}` shows what it learned.")
