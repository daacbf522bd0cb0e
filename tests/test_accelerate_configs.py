"""The launch files of configs/accelerate, as accelerate itself reads them; DeepSpeed need not be installed."""

import os
from pathlib import Path

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"


@pytest.fixture
def launched(monkeypatch):
    """The launcher's arguments under a configuration, and the environment that it gives the processes."""

    def read(name: str):
        words = ["--config_file", str(CONFIGS / name), "-m", "segrew", "train-rm"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ""
            environment = prepare_deepspeed_cmd_env(args)[1]
        else:
            environment = prepare_multi_gpu_env(args)
        for key in set(environment) - set(os.environ):
            monkeypatch.setenv(key, environment[key])
        return args, environment

    return read


def test_every_file_is_one_of_accelerates_own():
    files = sorted(path.name for path in CONFIGS.iterdir())
    assert files == ["deepspeed_zero2.yaml", "deepspeed_zero3.yaml", "fsdp2.yaml", "multi_gpu.yaml"]
    for name in files:
        config = load_config_from_file(str(CONFIGS / name))  # refuses keys that it does not know
        assert config.num_processes == 8 and config.num_machines == 1


def test_several_gpus(launched):
    args, environment = launched("multi_gpu.yaml")
    assert args.multi_gpu and not args.use_fsdp and not args.use_deepspeed
    assert args.num_processes == 8 and environment["ACCELERATE_MIXED_PRECISION"] == "no"


def test_fsdp2(launched):
    args, environment = launched("fsdp2.yaml")
    assert args.use_fsdp and environment["ACCELERATE_USE_FSDP"] == "true"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert not plugin.cpu_ram_efficient_loading and "FULL" in str(plugin.state_dict_type)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(launched, stage):
    args, environment = launched(f"deepspeed_zero{stage}.yaml")
    assert args.use_deepspeed and environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    plugin = DeepSpeedPlugin()
    settings = plugin.hf_ds_config.config
    assert plugin.zero_stage == stage == settings["zero_optimization"]["stage"]
    assert settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)
    assert (
        settings["gradient_accumulation_steps"] == settings["gradient_clipping"] == "auto"
    )  # the Trainer fills them in
