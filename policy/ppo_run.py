"""What lives as long as a PPO run: its directory, models, optimizer and prompts; how it opens, saves and ends."""

import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from torch import nn
from transformers import get_scheduler

from policy.backbone import keeps_adapter
from policy.checkpoint import find_checkpoint, forget_later_steps, load_checkpoint, load_policy, save_checkpoint
from policy.memory import count_by_role, estimate_memory, print_memory, print_roles
from policy.monitors import best_of
from policy.ppo_checks import unread_flags
from policy.ppo_config import PPOConfig
from policy.readings import RewardSource
from policy.reward_functions import FunctionReward
from policy.reward_sources import ModelReward, load_evaluators, load_sources, models_of
from policy.roles import Roles, load_roles
from policy.room import check_room
from policy.run_state import RunState
from policy.sampling import GenerationEngine
from policy.scoring import Axes
from reward_models.checkpoints import find_checkpoint as find_reward_model
from reward_models.checkpoints import write_for_older_readers
from segrew import processes
from segrew.chat import ChatFormat
from segrew.config import to_dict
from segrew.data_options import DataOptions
from segrew.language_models import best_dtype
from segrew.liger import apply_liger_kernel
from segrew.prompts import LoadedPrompts, Prompt, encode_prompts, load_prompts
from segrew.run_directory import RunDirectory, read_jsonl
from segrew.sources import DataRecord, prompt_key, warn_of_shared_prompts, write_records

BEST = "best-"  # and its step: the policy of the best evaluation, of a run with early stopping


def _say_nothing(text: str) -> None:
    """What processes but the first have to show."""


@dataclass
class Run:
    """Everything that lives as long as the run."""

    config: PPOConfig
    options: DataOptions
    directory: RunDirectory
    accelerator: Accelerator
    roles: Roles
    engine: GenerationEngine
    axes: Axes
    sources: list[RewardSource]
    evaluators: list[RewardSource]
    state: RunState
    policy: Any  # as prepared by accelerate
    critic: Any  # None where advantages need no values
    optimizer: Any
    scheduler: Any
    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    eval_prompts: list[tuple[Prompt, list[int]]]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    show: Callable[[str], None] = field(default_factory=lambda: print if processes.is_main() else _say_nothing)
    seconds: dict[str, float] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def warn_once(self, kind: str, text: str | None) -> None:
        """Warn of a kind of trouble the first time that there is a text."""
        if text is not None and kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(text, stacklevel=2)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Show and measure one part of a step."""
        self.show(name)
        start = time.perf_counter()
        yield
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()  # what was only queued belongs to this part
        self.seconds[name] = time.perf_counter() - start


def open_run(config: PPOConfig, options: DataOptions | None = None, command: str = "ppo") -> tuple[Run, int]:
    """Check and load everything, claim the directory, and return the run with the number of steps already done.

    What can be refused is refused first: by then nothing has been written or replaced.
    """
    options = options or DataOptions()
    accelerator, console = _accelerator(config), Console(stderr=True)
    for path in filter(None, [config.reward_model_path, *config.extra_reward_models, *config.eval_reward_models]):
        find_reward_model(path)
    checkpoint = find_checkpoint(config, options)
    directory, claim = RunDirectory(config.output_dir), _claim(config, options, command, checkpoint)
    if processes.is_main():
        directory.check(**claim)
    for text in unread_flags(config, keeps_adapter=keeps_adapter(config)):
        warnings.warn(text, stacklevel=2)
    loaded = _load(config, options)
    if processes.is_main():
        print_memory(estimate_memory(config), console)
    roles = load_roles(config, accelerator.device, checkpoint)
    engine = config.engine(
        roles.chat,
        dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32,
        max_model_len=config.max_prompt_length + config.max_new_tokens,
    )
    axes = Axes.from_config(config, roles.reward_model)
    sources, evaluators = load_sources(config, roles, axes), load_evaluators(config, roles)
    if config.use_liger_kernel:
        rewards = [model for part in (sources, evaluators) for model in models_of(part).values()]
        apply_liger_kernel(
            roles.policy.model, roles.reference, roles.critic and roles.critic.trunk, roles.segmenter, *rewards
        )
    encoded = {role: _encode(part.prompts, roles.chat, config) for role, part in loaded.items()}
    kept, ids, _ = encoded["training"]
    optimizer, scheduler = _optimizer(roles, config)
    _check_answers(config, roles, sources, encoded)
    _check_columns({"training": sources, "evaluation": [*sources, *evaluators]}, encoded)
    if processes.is_main():
        RunDirectory.create(config.output_dir, **claim)
        _record(directory.path, loaded, encoded, console)
        _announce(directory, config, roles, axes, sources, evaluators, len(kept), console)
        if config.sampling.warning:
            warnings.warn(config.sampling.warning, stacklevel=2)
    processes.wait()
    accelerator.init_trackers("segrew", config={})
    policy, prepared = _in_precision(accelerator, roles.policy), accelerator.prepare(optimizer)
    critic = None if roles.critic is None else _in_precision(accelerator, roles.critic)
    run = Run(
        config, options, directory, accelerator, roles, engine, axes, sources, evaluators, RunState(config.kl_coef),
        policy, critic, prepared, scheduler, kept, ids,
        list(zip(*encoded["evaluation"][:2], strict=True))[: config.eval_samples] if config.eval_dataset else [],
    )  # fmt: skip
    return run, 0 if checkpoint is None else _continue(run, checkpoint, optimizer)


def _claim(config: PPOConfig, options: DataOptions, command: str, checkpoint: Path | None) -> dict[str, Any]:
    resume = checkpoint is not None
    may = {"overwrite": config.overwrite_output_dir and not resume, "resume": resume}
    return {"command": command, "config": to_dict(config, options), **may}


def _continue(run: Run, checkpoint: Path, optimizer: torch.optim.Optimizer) -> int:
    done, run.state = load_checkpoint(checkpoint, run.roles.critic, optimizer, run.scheduler)
    if processes.is_main():
        forget_later_steps(run.directory.path, done)
    processes.wait()
    path = run.directory.path / "evaluation.jsonl"
    run.evaluations = read_jsonl(path) if path.exists() else []
    return done


def _in_precision(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """Let a module compute in the run's precision; gradients of several processes are summed by the update."""
    return accelerator.prepare_model(module, evaluation_mode=True)


def _accelerator(config: PPOConfig) -> Accelerator:
    processes.refuse_sharding("ppo")
    AcceleratorState._reset_state()  # a Trainer earlier in this process may have fixed another precision
    device = processes.state().device
    bf16 = best_dtype(device) == torch.bfloat16 if config.bf16 is None else config.bf16
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if bf16 else "no",
        log_with=None if config.report_to == "none" else config.report_to,
        project_dir=config.output_dir,
    )


Encoded = tuple[list[Prompt], list[list[int]], Counter]


def _load(config: PPOConfig, options: DataOptions) -> dict[str, LoadedPrompts]:
    """Load the prompts to train on, and those to evaluate on as a whole."""
    training, split = options.for_stage("ppo"), config.dataset_train_split
    loaded = {
        "training": load_prompts(config.dataset_name, split, training, limit=config.max_prompts, seed=config.seed)
    }
    if config.eval_dataset:
        reading = DataOptions(bad_rows=options.bad_rows, max_line_bytes=options.max_line_bytes)
        loaded["evaluation"] = load_prompts(config.eval_dataset, config.dataset_test_split, reading)
        trained, held_out = ([prompt_key(prompt.messages) for prompt in part.prompts] for part in loaded.values())
        warn_of_shared_prompts(trained, held_out, "prompts")
    return loaded


def _encode(prompts: list[Prompt], chat: ChatFormat, config: PPOConfig) -> Encoded:
    return encode_prompts(prompts, chat, config.max_prompt_length, config.overlong)


def _check_answers(config: PPOConfig, roles: Roles, sources: list[RewardSource], encoded: dict[str, Encoded]) -> None:
    """Refuse stop tokens that do not exist, and prompts that leave an answer no room in a model that reads it."""
    config.sampling.check(roles.chat)
    needed = [
        (prompt.where, len(ids) + config.max_new_tokens)
        for prompts, rows, _ in encoded.values()
        for prompt, ids in zip(prompts, rows, strict=True)
    ]
    remedy = (
        f"lower --max_new_tokens {config.max_new_tokens}, or --max_prompt_length {config.max_prompt_length} so that "
        "longer prompts are left out (--overlong truncate_prompt_left cuts them)."
    )
    check_room(roles.policy.model, needed, name="the policy", remedy=remedy)
    for path, model in models_of([source for source in sources if isinstance(source, ModelReward)]).items():
        check_room(model, needed, name=f"the reward model {path}", remedy=remedy)


def _check_columns(sources: dict[str, list[RewardSource]], encoded: dict[str, Encoded]) -> None:
    """Refuse prompts without a column that a reward function needs."""
    for role, (prompts, _, _) in encoded.items():
        for source in sources[role]:
            if isinstance(source, FunctionReward):
                source.require_columns(prompts)


def _record(directory: Path, loaded: dict[str, LoadedPrompts], encoded: dict[str, Encoded], console: Console) -> None:
    """Print and keep what was read, left out and cut."""
    records = [
        DataRecord(role, "prompts", len(encoded[role][0]), part.sources, encoded[role][2])
        for role, part in loaded.items()
    ]
    for record in records:
        console.print(str(record), highlight=False, markup=False, soft_wrap=True)
    write_records(directory, records)


def _announce(
    directory: RunDirectory,
    config: PPOConfig,
    roles: Roles,
    axes: Axes,
    sources: list[RewardSource],
    evaluators: list[RewardSource],
    kept: int,
    console: Console,
) -> None:
    """Print and record what is in force: sources, axes, sampling."""
    sampling, weights = (
        config.sampling.effective(roles.chat),
        count_by_role(roles.models() | models_of([*sources, *evaluators])),
    )
    rewards = f"terminal ({axes.rewards.label})" if axes.terminal else axes.rewards.label
    normalizer = axes.normalizer.mode if axes.normalizer else "none"
    directory.write_json(
        "settings.json",
        {
            "reward_rule": rewards,
            "action_rule": axes.actions.label,
            "normalizer": normalizer,
            "reward_sources": [source.name for source in sources],
            "reward_tokens": config.reward_tokens,
            "sampling": sampling,
            "prompts": kept,
            "own_segmenter_pass": roles.segmenter is not None,
            "read_in_the_reference_pass": list(roles.readers),
            "weights": weights,
        },
    )
    print_roles(weights, console)
    read = "text" if config.reward_tokens == "text" else "token ids"
    console.print(
        f"paid by {', '.join(source.name for source in sources)} (reward models read {read})", highlight=False
    )
    console.print(f"rewards {rewards}, actions {axes.actions.label}, normalizer {normalizer}")
    console.print("sampling " + ", ".join(f"{name} {value}" for name, value in sampling.items()), highlight=False)


def _optimizer(roles: Roles, config: PPOConfig) -> tuple[torch.optim.Optimizer, Any]:
    def trained(module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]

    groups = [{"params": trained(roles.policy), "lr": config.learning_rate}]
    if roles.critic is not None:
        groups.append({"params": trained(roles.critic), "lr": config.critic_learning_rate})
    optimizer = torch.optim.AdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    steps = config.total_steps * config.num_ppo_epochs * config.num_mini_batches
    special = {"min_lr_rate": config.min_lr_rate} if config.lr_scheduler_type == "cosine_with_min_lr" else None
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, config.warmup_steps, steps, scheduler_specific_kwargs=special
    )
    return optimizer, scheduler


def save_run(run: Run, step: int) -> None:
    """Write a checkpoint."""
    if processes.is_main():
        roles = run.roles
        save_checkpoint(
            run.directory.path,
            step,
            roles.policy.model,
            roles.critic,
            run.optimizer,
            run.scheduler,
            run.config,
            run.options,
            run.state,
        )
    processes.wait()


def save_best(run: Run, step: int) -> None:
    """Keep the policy as the best one so far, in place of the one before."""
    if processes.is_main():
        model, path = run.roles.policy.model, run.directory.path / f"{BEST}{step}"
        model.save_pretrained(path)  # type: ignore[operator]
        for old in set(run.directory.path.glob(f"{BEST}*")) - {path}:
            shutil.rmtree(old)
    processes.wait()


def _take_back_best(run: Run) -> None:
    """Give the policy the weights that it had at the best evaluation, where a run with early stopping has kept them."""
    if run.config.early_stopping_patience is None or not run.evaluations:
        return
    step = run.evaluations[best_of(run.evaluations, run.config.metric_for_best_model)]["step"]
    kept = run.directory.path / f"{BEST}{step}"
    if step < run.evaluations[-1]["step"] and kept.is_dir():
        load_policy(run.roles.policy.model, kept)
        run.show(f"the policy is that of step {step}, the best by {run.config.metric_for_best_model}")


def finish_run(run: Run) -> Path:
    """Write the policy, adapters merged, as a plain model directory: the best one of a run with early stopping."""
    path = run.directory.path
    if processes.is_main():
        _take_back_best(run)
        model: Any = run.roles.policy.model
        if run.config.use_peft:  # into the base that other roles share: the last thing that is done with it
            model = model.merge_and_unload()
        model.save_pretrained(path)
        run.roles.chat.tokenizer.save_pretrained(path)
        write_for_older_readers(path)
    processes.wait()
    run.accelerator.end_training()
    return path
