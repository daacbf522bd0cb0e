"""Checks of `segrew doctor` on the machine: what it can do, and what to do where it cannot."""

import os
from importlib.util import find_spec

import torch

from policy.code_promises import trusted_launcher
from policy.doctor_subject import DoctorConfig, Finding, Skip, Subject
from policy.memory import TAKES_LESS, available_memory, estimate_memory, free_memory
from policy.ppo_config import PPOConfig
from segrew.language_models import best_device, best_dtype
from segrew.phrases import load_parser
from segrew.rule_flags import RuleSettings


def processors() -> Finding:
    """Every processor that this process may use is used."""
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    measured = f"{cores} cores, {threads} threads of PyTorch"
    if threads >= max(1, cores // 2):  # PyTorch takes physical cores
        return Finding("ok", measured, cores)
    return Finding("warning", measured, cores, "Unset OMP_NUM_THREADS, or set it to the number of cores.")


def bfloat16_units() -> Finding:
    """The processor computes in bfloat16."""
    device = best_device()
    if best_dtype(device) == torch.bfloat16:
        return Finding("ok", f"on {device.type}", 1)
    remedy = "Nothing: float32 is taken by itself, and --bf16 true would be slower here."
    return Finding("warning", f"none on {device.type}", 0, remedy)


def cuda_device() -> Finding:
    """There is a CUDA device."""
    if not torch.cuda.is_available():
        remedy = (
            "Install a CUDA build of PyTorch if this machine has an NVIDIA GPU (nvidia-smi lists it); CPUs suffice for "
            "models of some 100 M weights."
        )
        return Finding("warning", "none", 0, remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("ok", ", ".join(names), len(names))


def attention() -> Finding:
    """Packed rows run in one compiled kernel (FlexAttention), padded ones in flash attention."""
    if not torch.cuda.is_available():
        raise Skip("no CUDA device; scaled dot products by block on CPU")
    flash = torch.backends.cuda.flash_sdp_enabled()
    if find_spec("triton") is None:
        return Finding(
            "fault", "no Triton, so no FlexAttention", 0, "pip install triton: packed rows need its compiler."
        )
    if not flash:
        remedy = "Call torch.backends.cuda.enable_flash_sdp(True): generation and padded rows are slower without it."
        return Finding("warning", "FlexAttention, flash attention turned off", 0, remedy)
    return Finding("ok", "FlexAttention and flash attention", 1)


def memory(subject: Subject, config: DoctorConfig) -> Finding:
    """PPO with its defaults fits into the memory."""
    free, there = free_memory(), available_memory()
    has = f"{free / 1e9:.1f} GB free of {there / 1e9:.1f}"
    if config.model_name_or_path is None or subject.part_or_none("model") is None:
        return Finding("ok", has, free)
    # Without a reward model, one of the policy's size.
    pays = config.reward_model or config.model_name_or_path
    run = PPOConfig(
        model_name_or_path=config.model_name_or_path, reward_model_path=pays, max_new_tokens=config.max_new_tokens
    )
    need = sum(estimate_memory(run).values())
    measured = f"{has}, PPO's defaults take up to {need / 1e9:.1f}"
    if need <= there:
        return Finding("ok", measured, need)
    return Finding("warning", measured, need, f"Lower {TAKES_LESS}")


def sandbox() -> Finding:
    """Programs that a policy writes can be run for rewards."""
    try:
        launcher = trusted_launcher()
    except ValueError as error:
        return Finding("warning", "none that keeps its promises", 0, str(error))
    return Finding("ok", f"{launcher.name}, every promise kept", 1)


def parser() -> Finding:
    """The extra `parse` is installed, for the rule constituency."""
    name = RuleSettings().parser
    try:
        load_parser(name)
    except ValueError as error:
        return Finding("warning", "rule constituency has no parser", 0, str(error))
    return Finding("ok", name, 1)
