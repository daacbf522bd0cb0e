"""`segrew rloo`: the PPO loop with the defaults of RLOO (2402.14740), one action a response and no critic."""

from typing import Any

from policy.ppo import main as ppo_main

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/rloo",
    "reward_rule": "terminal",
    "action_rule": "response",
    "advantage_estimator": "rloo",
    "num_samples_per_prompt": 4,
    "whitening": "none",
}


def main(argv: list[str]) -> None:
    """Run `segrew rloo`."""
    ppo_main(argv, "rloo", DEFAULTS)
