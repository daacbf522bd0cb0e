"""Commands of segrew, one after the other in the same process: `commands.py COMMANDS.json`."""

import json
import sys
from pathlib import Path

import torch

from segrew.cli import main

torch.cpu._is_avx512_bf16_supported = lambda: False  # float32, as in the tests

if __name__ == "__main__":
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        assert main(argv) == 0, argv
