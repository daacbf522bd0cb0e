"""Does a reward for each segment teach faster than the same total at the end? A planted task with a known optimum.

    python experiments/planted/run.py --seeds 10

Ordinary `segrew ppo` with the reward functions of keys.py; all arms have the same settings but for those in ARMS.
Writes curves.jsonl, settings.json, table.md and curves.png.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from curves import Curve, by_step, cell, learn, of_arm, paired, picture, run_all, speed_table, steps_to  # noqa: E402
from keys import LENGTH, LETTERS, UNIT, write_policy  # noqa: E402

TARGET = 0.9  # of an optimum of 1
DENSE: dict[str, Any] = {"reward_functions": ["keys:dense"], "reward_rule": "ngram", "n": UNIT, "interpolation": "last"}
TERMINAL: dict[str, Any] = {"reward_functions": ["keys:terminal"]}
UNITS: dict[str, Any] = {"action_rule": "ngram", "n": UNIT, "ratio": "joint"}
ARMS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense, lambda .5": DENSE | {"lam": 0.5},
    "dense, lambda 1": DENSE | {"lam": 1.0},
    "dense, units act": DENSE | UNITS,
    "terminal": TERMINAL,
    "terminal, lambda .5": TERMINAL | {"lam": 0.5},
    "terminal, lambda 1": TERMINAL | {"lam": 1.0},
    "terminal, units act": TERMINAL | UNITS,
}
PAIRS = [(f"dense{how}", f"terminal{how}") for how in ("", ", lambda .5", ", lambda 1", ", units act")]
SHARED: dict[str, Any] = {
    "reward_model_path": "", "chat_template": "raw", "rollout_batch_size": 4, "local_rollout_forward_batch_size": 4,
    "per_device_train_batch_size": 4, "max_new_tokens": LENGTH, "num_ppo_epochs": 1, "num_mini_batches": 1,
    "kl_coef": 0.0, "learning_rate": 5e-3, "critic_learning_rate": 5e-3, "total_steps": 120, "save_steps": 0,
    "samples_per_step": 0, "bf16": False,
}  # fmt: skip


def table(curves: list[Curve]) -> str:
    """Updates to 90 % of the optimum by arm, and the dense arms against the terminal ones seed by seed."""
    lines = [speed_table(curves, ARMS, (0.5, TARGET)), ""]
    for arm, other in PAIRS:
        more = paired(curves, other, arm, lambda curve: steps_to(curve, TARGET) or curve["steps"])
        if more:
            lines.append(f"`{other}` less `{arm}`, steps to 90 %, seed by seed: {cell(more, 1)}.")
    return "\n".join([*lines, "", f"A run that never arrives counts as {SHARED['total_steps']} there."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--work", type=Path, default=Path("runs/planted"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    prompts = args.work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in LETTERS))
    (HERE / "settings.json").write_text(json.dumps({"shared": SHARED, "arms": ARMS}, indent=1) + "\n")

    def run(arm: str, seed: int) -> Curve:
        policy = write_policy(args.work / f"policy-{seed}", seed)
        files = {"model_name_or_path": str(policy), "dataset_name": str(prompts)}
        return learn(SHARED | ARMS[arm] | files | {"seed": seed}, args.work / f"{list(ARMS).index(arm)}-{seed}")

    for curves in run_all(HERE / "curves.jsonl", args.arms, args.seeds, run):
        (HERE / "table.md").write_text(table(curves) + "\n")
    lines = {arm: [by_step(curve) for curve in of_arm(curves, arm)] for arm in ARMS}
    picture(HERE / "curves.png", {"planted keys": lines}, x="PPO step", y="share of the optimum", target=TARGET)
    print(table(curves))


if __name__ == "__main__":
    main()
