"""What a checkpoint holds is plain data: nothing in it runs when it is loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from policy.checkpoint import CRITIC_FILE, OPTIMIZER_FILE, STATE_FILE, load_checkpoint
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
