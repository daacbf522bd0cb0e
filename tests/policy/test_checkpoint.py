"""What a checkpoint holds is plain data: nothing in it runs when it is loaded. And how many are kept."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import policy.ppo as ppo
from policy.checkpoint import CRITIC_FILE, OPTIMIZER_FILE, STATE_FILE, load_checkpoint, save_checkpoint
from policy.ppo_config import PPOConfig
from policy.run_state import RunState
from segrew.cli import main
from segrew.data_options import DataOptions
from segrew.run_directory import write_json


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_b50_no_code_of_a_checkpoint_is_run(tmp_path):
    marker = tmp_path / "marker"
    save_file({}, tmp_path / CRITIC_FILE)
    write_json(tmp_path / STATE_FILE, {"step": 1, "config": {}, "state": {}})
    torch.save({"optimizer": Touches(marker), "scheduler": {}}, tmp_path / OPTIMIZER_FILE)
    with pytest.raises(ValueError, match=rf"{OPTIMIZER_FILE}: holds more than plain data"):
        load_checkpoint(tmp_path, None, None, None)
    assert not marker.exists()
    torch.load(tmp_path / OPTIMIZER_FILE, weights_only=False)
    assert marker.exists()  # so the trap works


@pytest.mark.parametrize("limit, kept", [(None, [1, 2, 10]), (2, [2, 10]), (0, [1, 2, 10]), (-1, [1, 2, 10])])
def test_the_newest_checkpoints_are_kept_and_all_without_a_positive_limit(tmp_path, limit, kept):
    policy, config = torch.nn.Linear(1, 1), PPOConfig(reward_model_path="x", save_total_limit=limit)
    policy.save_pretrained = Path.mkdir
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, policy, None, optimizer, optimizer, config, DataOptions(), RunState(0.1))
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == kept


def test_an_interrupted_run_says_how_it_goes_on(settings, monkeypatch, capsys):
    config = settings(total_steps=3, save_steps=1)
    given = dataclasses.asdict(config)
    names = ("model_name_or_path", "reward_model_path", "dataset_name", "output_dir", "max_new_tokens",
             "max_prompt_length", "rollout_batch_size", "save_steps")  # fmt: skip
    argv = ["ppo", *(word for name in names for word in (f"--{name}", str(given[name]))), "--overwrite_output_dir"]
    step = ppo.train_step
    for last in (1, 2):  # in the first step there is nothing to go on from

        def stopped(run, number, last=last):
            if number == last:
                raise KeyboardInterrupt
            return step(run, number)

        monkeypatch.setattr(ppo, "train_step", stopped)
        assert main([*argv, "true"]) == 130
        said = capsys.readouterr().err
        assert ("checkpoint-1 is kept; --resume_from_checkpoint latest goes on." in said) == (last == 2)
        assert "interrupted." in said
