"""`segrew probe`: which action granularity has the quietest gradient, from one set of rollouts and no update.

Every granularity sees the same answers, rewards and values; only the units that advantages are computed over differ.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from policy.experience import Experience, densify
from policy.gradient_noise import relative_variance, sampled_coordinates
from policy.minibatches import micro_batches_of
from policy.ppo import collect, positions_of, train_step
from policy.ppo_config import PPOConfig
from policy.ppo_run import Run, open_run
from policy.probe_report import ENOUGH, draw, recommend
from policy.rollout import Rollout
from policy.update import surrogate
from segrew import processes
from segrew.config import arg, parse
from segrew.data_options import DataOptions
from segrew.macro_actions import value_by_unit
from segrew.masking import masked_mean
from segrew.rule_flags import RuleSettings
from segrew.segmentation import RULES, SegmentationConfig

DEFAULTS: dict[str, Any] = {"output_dir": "runs/probe", "rollout_batch_size": 128, "per_device_train_batch_size": 8}
RESAMPLES = 1000


@dataclass
class ProbeConfig:
    """Which granularities to compare."""

    granularities: list[str] = arg(
        ["token", "ngram-2", "ngram-5", "ngram-10", "random_ngram", "entropy~3", "entropy~6", "perplexity", "response"],
        help="Action rules; ngram-N has N tokens a unit, entropy~L the threshold that gives L tokens on average here.",
    )


def rule_of(name: str, settings: RuleSettings) -> SegmentationConfig:
    """Read a granularity as a rule; what it does not say itself comes from the settings.

    Raises:
        ValueError: there is no such rule.
    """
    found = re.fullmatch(r"(?:(ngram)-(\d+)|(entropy)~([\d.]+)|(\w+))", name)
    if found is None or (found[5] and found[5] not in set(RULES) - {"entropy", "ngram"}):
        raise ValueError(f"--granularities {name}: expected a rule such as token, ngram-5, entropy~4 or response.")
    if found[1]:
        return replace(settings.rule_named("ngram"), n=int(found[2]))
    if found[3]:
        return settings.rule_named("entropy", target_length=float(found[4]))
    return settings.rule_named(found[5])


def run_probe(config: PPOConfig, settings: ProbeConfig, console: Console, options: DataOptions | None = None) -> Path:
    """Compare granularities and write probe.json and probe.png."""
    rules = {name: rule_of(name, config) for name in settings.granularities}
    answers, at_once = config.rollout_batch_size, config.per_device_train_batch_size
    if answers <= at_once:
        raise ValueError(
            f"--rollout_batch_size {answers}: one micro-batch (--per_device_train_batch_size {at_once}) shows no "
            f"gradient noise, the variance between micro-batches; set it to {ENOUGH * at_once} or more."
        )
    run, _ = open_run(replace(config, total_steps=config.critic_warmup_steps), options, command="probe")
    for step in range(1, config.critic_warmup_steps + 1):
        train_step(run, step)
    rollout, experiences = experiences_of(run, rules)
    run.show("gradients")
    gradients, shares = micro_batch_gradients(run, rollout, experiences)
    rows = [describe(name, experiences[name], gradients[name], shares, config.seed) for name in settings.granularities]
    if not processes.is_main():
        return run.directory.path
    result = {"granularities": rows, "recommendation": recommend(rows, len(shares)), "answers": len(rollout.texts)}
    run.directory.write_json("probe.json", result)
    draw(rows, run.directory.path / "probe.png")
    console.print(table_of(rows))
    console.print(result["recommendation"])
    return run.directory.path


def experiences_of(run: Run, rules: dict[str, SegmentationConfig]) -> tuple[Rollout, dict[str, Experience]]:
    """Sample and score once, and compute advantages over the units of every rule."""
    config, step = run.config, run.config.critic_warmup_steps + 1
    positions = positions_of(run, step)
    if len(positions) < processes.count() * config.num_samples_per_prompt:
        raise ValueError(
            f"--rollout_batch_size {config.rollout_batch_size}: `segrew probe` needs a prompt for each of its "
            f"{processes.count()} processes; make it larger."
        )
    rollout, units, scores = collect(run, step, positions, tuple(rules.values()))
    return rollout, {
        name: densify(config, rollout, replace(units, actions=units.cuts[rule]), scores, run.state.kl_coef)
        for name, rule in rules.items()
    }


def last_layer(module: nn.Module) -> list[nn.Parameter]:
    """The trained weights of the last numbered layer; all trained weights where layers have no numbers."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    numbers = {name: max(map(int, re.findall(r"\.(\d+)\.", name)), default=-1) for name in trained}
    last = max(numbers.values())
    return [p for name, p in trained.items() if numbers[name] == last]


def micro_batch_gradients(
    run: Run, rollout: Rollout, experiences: dict[str, Experience]
) -> tuple[dict[str, Float[Tensor, "k c"]], Float[Tensor, " k"]]:
    """The gradient of the policy loss in each micro-batch, on a sample of the last layer's coordinates.

    One forward pass of a micro-batch serves every granularity.

    Returns:
        For each granularity one row a micro-batch, and the micro-batches' shares of the tokens.
    """
    config, rows = run.config, list(range(len(rollout.texts)))
    weights = last_layer(run.roles.policy)
    places = sampled_coordinates(weights)
    found: dict[str, list[Tensor]] = {name: [] for name in experiences}
    tokens = []
    for part in processes.share(
        list(micro_batches_of(rows, rollout.conversations, config.per_device_train_batch_size))
    ):
        conversations = rollout.conversations.select(part)
        with run.accelerator.autocast():
            logprobs, _ = run.roles.policy(conversations, temperature=config.temperature)
        for name, experience in experiences.items():
            loss, _ = surrogate(config, rollout, experience, part, logprobs)
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
            found[name].append(torch.cat([g.flatten()[at].float() for g, at in zip(grads, places, strict=True)]))
        tokens.append(sum(conversations.lengths))
    everyones = {name: torch.stack(processes.gather_list(grads)) for name, grads in found.items()}
    return everyones, torch.tensor(processes.gather_list(tokens)).float()


def describe(
    name: str, experience: Experience, gradients: Float[Tensor, "k c"], shares: Float[Tensor, " k"], seed: int
) -> dict[str, Any]:
    """What a granularity's advantages and gradient are like.

    `gradient_noise` is the variance between micro-batches over the squared mean; its draws resample micro-batches, the
    same ones for every granularity.
    """
    actions = experience.units.actions
    of_units = value_by_unit(experience.advantages, actions, scheme="first")
    mean = masked_mean(of_units, actions.unit_mask)
    variance = masked_mean((of_units - mean).square(), actions.unit_mask)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(shares), (RESAMPLES, len(shares)), generator=generator)
    shares = shares.to(gradients.device)
    draws = [relative_variance(gradients[pick], shares[pick]).item() for pick in picks]
    return {
        "rule": name,
        "units": actions.counts.float().mean().item(),
        "unit_length": (actions.mask.sum() / actions.counts.sum().clamp(min=1)).item(),
        "advantage_mean": mean.item(),
        "advantage_variance": variance.item(),
        "gradient_noise": relative_variance(gradients, shares).item(),
        "draws": draws,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The comparison as a table for the terminal."""
    table = Table("actions", "a response", "tokens each", "variance of advantages", "gradient noise", title="Probe")
    for row in rows:
        numbers = (row["units"], row["unit_length"], row["advantage_variance"], row["gradient_noise"])
        table.add_row(row["rule"], *(f"{number:.3g}" for number in numbers))
    return table


def main(argv: list[str]) -> None:
    """Run `segrew probe`."""
    config, probe, options = parse("probe", (PPOConfig, ProbeConfig, DataOptions), argv, defaults=DEFAULTS)
    path = run_probe(config, probe, Console(), options)
    if processes.is_main():
        Console(stderr=True).print(f"The picture is {path / 'probe.png'}, the numbers are in {path / 'probe.json'}.")
