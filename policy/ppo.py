"""`segrew ppo`: dense-reward PPO, with any reward granularity and any action granularity in one loop.

A step samples answers, cuts them into units, scores the units, spreads the rewards over tokens, computes
advantages over the action units, and updates policy and critic.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from policy.experience import densify
from policy.held_out import evaluate, should_stop
from policy.kl_control import adapted_coefficient
from policy.minibatches import prompt_positions, step_generator
from policy.ppo_config import PPOConfig
from policy.ppo_report import measure, report
from policy.ppo_run import Run, finish_run, open_run, save_run
from policy.readings import Answered
from policy.reward_sources import read_rewards
from policy.rollout import Rollout, in_micro_batches, sample_answers
from policy.samples import sample_rows
from policy.scoring import cut_units
from policy.update import update
from segrew.config import parse
from segrew.data_options import DataOptions

__all__ = ["PPOConfig", "main", "train_policy"]


def train_policy(config: PPOConfig, options: DataOptions | None = None) -> Path:
    """Train a policy and return its directory.

    Raises:
        ValueError: something in the settings, the files or the rewards is wrong; the message says what to do.
    """
    run, done = open_run(config, options)
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
            if should_stop(run, step):
                break
    return finish_run(run)


def train_step(run: Run, step: int) -> dict[str, int | float]:
    """One PPO step: sample, cut, score, densify, advantages, update."""
    config, accelerator, axes = run.config, run.accelerator, run.axes.at(step)
    generator = step_generator(config.seed, step, accelerator.process_index)
    positions = positions_of(run, step)
    with run.clock("rollout"):
        rollout = sample(run, positions, generator)
    answered = Answered([run.prompts[i] for i in positions], rollout.conversations, rollout.texts)
    with run.clock("segment"), accelerator.autocast():
        units = cut_units(rollout.conversations, run.roles, axes, config, generator)
    with run.clock("score"), accelerator.autocast():
        scores = read_rewards(run.sources, config.reward_weights, answered, units, skip_bad=config.skip_bad_rows)
    experience = densify(config, accelerator, rollout, units, scores, run.state.kl_coef)
    with run.clock("update"):
        stats = update(run, rollout, experience, generator, warming_up=step <= config.critic_warmup_steps)
    if accelerator.is_main_process:
        for line in sample_rows(step, "train", answered, scores, run.sources, run.roles.chat, config.samples_per_step):
            run.directory.append("samples.jsonl", line)
    metrics = {"step": step} | measure(run, rollout, experience, scores, stats)
    if config.kl_controller == "adaptive":
        run.state.kl_coef = adapted_coefficient(
            run.state.kl_coef,
            metrics["kl/answer"],
            target=config.kl_target,
            answers=config.rollout_batch_size,
            horizon=config.kl_horizon,
        )
    return metrics


def positions_of(run: Run, step: int) -> list[int]:
    """The prompts of a step on this process, each as often as it is answered."""
    config, accelerator = run.config, run.accelerator
    answers = config.num_samples_per_prompt
    drawn = prompt_positions(len(run.prompts), step, config.rollout_batch_size // answers, config.seed)
    return [i for i in drawn[accelerator.process_index :: accelerator.num_processes] for _ in range(answers)]


@torch.no_grad()
def sample(run: Run, positions: list[int], generator: torch.Generator) -> Rollout:
    """Draw an answer to each prompt and note what policy and critic say of it before anything moves."""
    config, roles = run.config, run.roles
    policy, critic = roles.policy.eval(), roles.critic
    prompts = [run.prompt_ids[i] for i in positions]
    with run.accelerator.autocast():
        answers = sample_answers(policy.model, roles.chat, prompts, config.sampling, generator, engine=run.engine)
        tokens = config.max_tokens_per_batch
        read = partial(policy, temperature=config.temperature)
        logprobs, entropy = in_micro_batches(read, answers.conversations, tokens)
        values, after = torch.zeros_like(logprobs), None
        if critic is not None:
            critic.eval()
            (values,) = in_micro_batches(lambda part: (critic(part),), answers.conversations, tokens)
            if config.truncated_answers == "bootstrap":
                (after,) = in_micro_batches(lambda part: (critic.after(part),), answers.conversations, tokens)
                after = after[:, 0].masked_fill(answers.conversations.ended.to(after.device), 0.0)
    gap = answers.logprob_gap(logprobs)
    return Rollout(answers.conversations, answers.texts, logprobs, entropy, values, after, gap)


def main(argv: list[str], command: str = "ppo", defaults: dict[str, Any] | None = None) -> None:
    """Run `segrew ppo`, or the command that is PPO with other defaults."""
    config, options = parse(command, (PPOConfig, DataOptions), argv, defaults=defaults)
    path = train_policy(config, options)
    if PartialState().is_main_process:
        Console(stderr=True).print(f"The policy is in {path}; `segrew report --run_dirs {path}` shows what it learned.")
