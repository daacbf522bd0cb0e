"""Checkpoints from which a stopped run continues as if it had never stopped.

What a step draws depends only on the seed, the step and the process, so a checkpoint holds no random state.
"""

import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from policy.ppo_config import PPOConfig
from policy.run_state import RunState
from segrew.data_options import DataOptions
from segrew.language_models import adapter_base, load_causal_lm
from segrew.run_directory import read_json, read_jsonl, require_same_settings, write_json, write_jsonl

STATE_FILE, CRITIC_FILE, OPTIMIZER_FILE = "state.json", "critic.safetensors", "optimizer.pt"
LOGS = ("metrics.jsonl", "samples.jsonl", "evaluation.jsonl")
# What a resumed run may change without ceasing to be the same run.
FREE_ON_RESUME = {
    "total_steps", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "eval_steps", "save_steps",
    "save_total_limit", "samples_per_step", "report_to", "code_workers", "vllm_gpu_memory_utilization",
}  # fmt: skip


def find_checkpoint(config: PPOConfig, options: DataOptions) -> Path | None:
    """Return the checkpoint that the settings ask for; None if they ask for none.

    Raises:
        ValueError: there is none, or it belongs to a run with other settings.
    """
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    run = Path(config.output_dir)
    if wanted in ("latest", "true", "True"):
        latest = latest_checkpoint(run)
        if latest is None:
            raise ValueError(f"--resume_from_checkpoint {wanted}: {run} holds no checkpoint; run without it.")
        path = latest
    else:
        path = Path(wanted)
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"--resume_from_checkpoint {wanted}: {path} is no checkpoint of `segrew ppo`.")
    matter = {name: value for name, value in {**vars(config), **vars(options)}.items() if name not in FREE_ON_RESUME}
    require_same_settings(read_json(path / STATE_FILE)["config"], matter, path)
    if (run / "run.json").exists() and path.resolve().parent != run.resolve():
        raise ValueError(
            f"--resume_from_checkpoint {wanted}: belongs to another run than the one in --output_dir {run}; "
            "name that run's directory, or a new one."
        )
    return path


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of a run; None if it has none."""
    return max(run.glob("checkpoint-*"), key=_step_of, default=None)


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def save_checkpoint(
    run: Path,
    step: int,
    policy: nn.Module,
    critic: nn.Module | None,
    optimizer: Any,
    scheduler: Any,
    config: PPOConfig,
    options: DataOptions,
    state: RunState,
) -> None:
    """Write checkpoint-STEP in one move, then drop the oldest beyond the limit."""
    target, partial = run / f"checkpoint-{step}", run / f"partial-checkpoint-{step}"
    shutil.rmtree(partial, ignore_errors=True)
    policy.save_pretrained(partial)  # type: ignore[operator]
    save_file({name: p.detach().cpu().contiguous() for name, p in _trained(critic)}, partial / CRITIC_FILE)
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, partial / OPTIMIZER_FILE)
    write_json(
        partial / STATE_FILE, {"step": step, "config": {**vars(config), **vars(options)}, "state": asdict(state)}
    )
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    if config.save_total_limit is not None and config.save_total_limit > 0:  # as in TrainingArguments
        for old in sorted(run.glob("checkpoint-*"), key=_step_of)[: -config.save_total_limit]:
            shutil.rmtree(old)


def load_policy(policy: Any, directory: Path) -> None:
    """Give a policy the weights, all or its adapter's, that its `save_pretrained` wrote."""
    if adapter_base(str(directory)) is not None:
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(policy, load_peft_weights(str(directory), device="cpu"))
    else:
        policy.load_state_dict(
            load_causal_lm(str(directory), dtype=torch.float32, device=torch.device("cpu")).state_dict()
        )


def _trained(critic: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    return [] if critic is None else [(name, p) for name, p in critic.named_parameters() if p.requires_grad]


def load_checkpoint(path: Path, critic: nn.Module | None, optimizer: Any, scheduler: Any) -> tuple[int, RunState]:
    """Restore the critic, the optimizer and the schedule; return the step that was done last, and the run's state."""
    if critic is not None:
        missing = critic.load_state_dict(load_file(path / CRITIC_FILE), strict=False).missing_keys
        assert not {name for name, _ in _trained(critic)} & set(missing), "the checkpoint lacks weights of the critic"
    try:
        saved = torch.load(path / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path / OPTIMIZER_FILE}: holds more than plain data, or is damaged; not loaded.") from None
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    record = read_json(path / STATE_FILE)
    return record["step"], RunState(**record["state"])


def forget_later_steps(run: Path, step: int) -> None:
    """Drop the log lines that the resumed run will write again."""
    for name in LOGS:
        if (run / name).exists():
            write_jsonl(run / name, [row for row in read_jsonl(run / name) if row["step"] <= step])
