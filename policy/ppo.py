"""`segrew ppo`: dense-reward PPO, with any reward granularity and any action granularity in one loop.

A step samples answers, cuts them into units, scores the units, spreads the rewards over tokens, computes
advantages over the action units, and updates policy and critic.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from policy.checkpoint import latest_checkpoint
from policy.experience import densify
from policy.held_out import evaluate, should_stop
from policy.kl_control import adapted_coefficient
from policy.minibatches import FOR_ALL, prompt_positions, step_generator
from policy.ppo_config import PPOConfig
from policy.ppo_report import measure, report
from policy.ppo_run import Run, finish_run, open_run, save_run
from policy.readings import Answered, Scores, Units
from policy.reward_sources import read_rewards
from policy.rollout import Rollout, in_micro_batches, sample_answers
from policy.samples import sample_rows
from policy.scoring import cut_units
from policy.update import update
from segrew import processes
from segrew.config import parse
from segrew.data_options import DataOptions
from segrew.segmentation import SegmentationConfig

__all__ = ["PPOConfig", "main", "train_policy"]


def train_policy(config: PPOConfig, options: DataOptions | None = None, command: str = "ppo") -> Path:
    """Train a policy and return its directory; one that fails before its first step leaves none.

    Args:
        command: what the run is called in its progress bar and `run.json`.

    Raises:
        ValueError: something in the settings, the files or the rewards is wrong; the message says what to do.
    """
    run, done = open_run(config, options, command)
    main, name = processes.is_main(), command.upper()
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with (
        run.directory.given_back_without("metrics.jsonl") if main else nullcontext(),
        Progress(*columns, console=Console(stderr=True), disable=not main) as progress,
    ):
        bar = progress.add_task(name, total=config.total_steps, completed=done)
        run.show = lambda text: progress.update(bar, description=f"{name}  {text:24}")
        if done == 0:
            evaluate(run, 0)
        for step in range(done + 1, config.total_steps + 1):
            metrics = train_step(run, step)
            if step % config.eval_steps == 0 or step == config.total_steps:
                with run.clock("evaluation"):
                    found = evaluate(run, step)
                if found:
                    metrics |= found | {"time/evaluation": run.seconds["evaluation"]}
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
    config, positions = run.config, positions_of(run, step)
    run.seconds.clear()
    rollout, units, scores = collect(run, step, positions)
    with run.clock("advantages"):
        experience = densify(config, rollout, units, scores, run.state.kl_coef)
    with run.clock("update"):
        order = step_generator(config.seed, step, FOR_ALL)
        stats = update(run, rollout, experience, order, warming_up=step <= config.critic_warmup_steps)
    if processes.is_main():
        answered = Answered([run.prompts[i] for i in positions], rollout.conversations, rollout.texts)
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
    """The prompts of a step, each as often as it is answered."""
    config, answers = run.config, run.config.num_samples_per_prompt
    drawn = prompt_positions(len(run.prompts), step, config.rollout_batch_size // answers, config.seed)
    return [i for i in drawn for _ in range(answers)]


def collect(
    run: Run, step: int, positions: list[int], further: tuple[SegmentationConfig, ...] = ()
) -> tuple[Rollout, Units, Scores]:
    """Sample, cut and score this process's share of the answers, and join it with those of the others.

    Args:
        further: see `cut_units`.
    """
    config, own, found = run.config, processes.share(positions, run.config.num_samples_per_prompt), None
    if own:
        generator = step_generator(config.seed, step, processes.rank())
        rollout = sample(run, own, generator)
        answered = Answered([run.prompts[i] for i in own], rollout.conversations, rollout.texts)
        with run.clock("segment"), run.accelerator.autocast():
            units = cut_units(rollout.conversations, run.roles, run.axes.at(step), config, generator, further)
        with run.clock("score"), run.accelerator.autocast():
            scores = read_rewards(run.sources, config.reward_weights, answered, units, skip_bad=config.skip_bad_rows)
        found = rollout, units, scores
    with run.clock("wait"):
        return processes.joined(found, run.accelerator.device)


@torch.no_grad()
def sample(run: Run, positions: list[int], generator: torch.Generator) -> Rollout:
    """Draw an answer to each prompt and note what policy and critic say of it before anything moves."""
    config, roles = run.config, run.roles
    policy, critic = roles.policy.eval(), roles.critic
    prompts = [run.prompt_ids[i] for i in positions]
    tokens = config.max_tokens_per_batch
    with run.clock("rollout"), run.accelerator.autocast():
        answers = sample_answers(policy.model, roles.chat, prompts, config.sampling, generator, engine=run.engine)
    conversations = answers.conversations
    with run.clock("logprobs"), run.accelerator.autocast():
        read = partial(policy, temperature=config.temperature)
        logprobs, entropy = in_micro_batches(read, conversations, tokens)
    values, after = torch.zeros_like(logprobs), None
    if critic is not None:
        with run.clock("values"), run.accelerator.autocast():
            critic.eval()
            if config.truncated_answers == "bootstrap":
                values, after = in_micro_batches(critic.with_after, conversations, tokens)
                after = after[:, 0].masked_fill(conversations.ended.to(after.device), 0.0)
            else:
                (values,) = in_micro_batches(lambda part: (critic(part),), conversations, tokens)
    gap = answers.logprob_gap(logprobs)
    return Rollout(conversations, answers.texts, logprobs, entropy, values, after, gap)


def main(argv: list[str], command: str = "ppo", defaults: dict[str, Any] | None = None) -> None:
    """Run `segrew ppo`, or the command that is PPO with other defaults."""
    config, options = parse(command, (PPOConfig, DataOptions), argv, defaults=defaults)
    try:
        path = train_policy(config, options, command)
    except KeyboardInterrupt:
        kept = latest_checkpoint(Path(config.output_dir))
        raise KeyboardInterrupt(f"{kept} is kept; --resume_from_checkpoint latest goes on." if kept else "") from None
    if processes.is_main():
        Console(stderr=True).print(f"The policy is in {path}; `segrew report --run_dirs {path}` shows what it learned.")
