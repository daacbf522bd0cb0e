"""segrew on two processes of the CPU that accelerate takes for two GPUs, as it divides weights over no other."""

import os
import sys

import torch
from accelerate import PartialState
from accelerate.state import DistributedType

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
torch.cpu._is_avx512_bf16_supported = lambda: False  # float32, as in the tests

from reward_models.pair_trainer import PairTrainer  # noqa: E402
from segrew.cli import main  # noqa: E402

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    whole_weights = PairTrainer.whole_weights

    def noting(trainer):
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        local = sum(p.to_local().numel() for p in weights)
        print(f"divided: {int(local < 0.6 * sum(p.numel() for p in weights))}", flush=True)
        return whole_weights(trainer)

    PairTrainer.whole_weights = noting
    sys.exit(main(sys.argv[1:]))
