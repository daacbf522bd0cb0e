"""Do macro actions learn faster, and is it the macros or the longer effective lambda? A tiny model, a terminal reward.

    pip install vaderSentiment
    python experiments/macro_actions/run.py --model PATH_OF_A_SMALL_STORY_MODEL --seeds 8 --steps 30

Every arm is PPO with the same settings but for those in GROUPS; the arms `parsing` need a spaCy pipeline, named with
--parser. An arm and seed that is finished is not run again, so an interrupted run goes on. Writes curves.jsonl (mean
score of the sampled answers at each step, seconds), settings.json, table.md and curves.png.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from curves import Curve, by_step, final, learn, of_arm, picture, run_all, speed_table  # noqa: E402
from stories import OPENINGS, write_prompts  # noqa: E402

N = 5
Arms = dict[str, dict[str, Any]]
MACRO: dict[str, Any] = {"ratio": "joint"}
NGRAMS: dict[str, Any] = {"action_rule": "ngram", "n": N, **MACRO}
LONG: dict[str, Any] = {"lam": 0.95 ** (1 / N)}
WITH_N = {"token": {}, "ngram-5": NGRAMS}  # what every further comparison is made of
WITH_LAMBDA = WITH_N | {"token, lambda .95^(1/5)": LONG}
GROUPS: dict[str, Arms] = {
    "actions": {
        "token": {},
        "token, lambda .99": {"lam": 0.99},
        "token, lambda .95^(1/5)": LONG,
        "token, lambda 1": {"lam": 1.0},
        "ngram-3": {"action_rule": "ngram", "n": 3, **MACRO},
        "ngram-5": NGRAMS,
        "ngram-10": {"action_rule": "ngram", "n": 10, **MACRO},
        "response": {"action_rule": "response", **MACRO},
        "perplexity": {"action_rule": "perplexity", **MACRO},
        "ngram-5, token ratio": {"action_rule": "ngram", "n": N},
        "token, no whitening": {"whitening": "none"},
        "ngram-5, no whitening": NGRAMS | {"whitening": "none"},
        "rloo": {"advantage_estimator": "rloo", "action_rule": "response", "num_samples_per_prompt": 4},
        "random": {"action_rule": "random_ngram", **MACRO},
        "parsing": {"action_rule": "constituency", **MACRO},
    },
    "value schemes": {f"ngram-5, value {scheme}": NGRAMS | {"value_scheme": scheme} for scheme in ("last", "decayed")},
    "rates": {
        f"{arm}, rate {rate:g}": settings | {"learning_rate": rate}
        for rate in (1e-4, 1e-3)
        for arm, settings in WITH_N.items()
    },
    "noise": {
        f"{arm}, noise": settings | {"reward_functions": ["rewards:noisy"]} for arm, settings in WITH_LAMBDA.items()
    },
    "length": {
        f"{arm}, {length} tokens": settings | {"max_new_tokens": length}
        for length in (16, 64)
        for arm, settings in WITH_LAMBDA.items()
    },
}  # fmt: skip
ARMS: Arms = {name: settings for arms in GROUPS.values() for name, settings in arms.items()}
# Sets of arms that share a target, the first one's final score: what each is compared within.
COMPARED: dict[str, list[str]] = {
    "actions": list(GROUPS["actions"]),
    "value schemes": ["token", "ngram-5", *GROUPS["value schemes"]],
    "rate 1e-4 (above: 3e-4)": [f"{arm}, rate 0.0001" for arm in WITH_N],
    "rate 1e-3": [f"{arm}, rate 0.001" for arm in WITH_N],
    "reward with noise": list(GROUPS["noise"]),
    "16 tokens (above: 32)": [f"{arm}, 16 tokens" for arm in WITH_LAMBDA],
    "64 tokens": [f"{arm}, 64 tokens" for arm in WITH_LAMBDA],
}
SHARED: dict[str, Any] = {
    "reward_model_path": "", "reward_functions": ["stories:vader"], "chat_template": "raw",
    "rollout_batch_size": 64, "local_rollout_forward_batch_size": 64, "per_device_train_batch_size": 16,
    "max_new_tokens": 32, "num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.02, "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3, "save_steps": 0, "samples_per_step": 0, "bf16": False,
}  # fmt: skip


def table(curves: list[Curve]) -> str:
    """Final score, steps and seconds to (four fifths of) where the first arm of each comparison ends."""
    parts = []
    for title, arms in COMPARED.items():
        first = of_arm(curves, arms[0])
        if first and (title == "actions" or of_arm(curves, arms[-1])):
            target = statistics.fmean(final(curve) for curve in first)
            told = f"Target: {target:.3f}, the mean score of the last ten steps of `{arms[0]}` (all its seeds)."
            parts += [f"## {title}", told, speed_table(curves, arms, (0.8 * target, target))]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--parser", help="spaCy pipeline for the arm `parsing`, which is left out without one.")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--arms", nargs="+", help="Only these.")
    parser.add_argument("--work", type=Path, default=Path("runs/macro_actions"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    prompts = write_prompts(args.work / "prompts.jsonl", OPENINGS)
    shared = SHARED | {"total_steps": args.steps}
    (HERE / "settings.json").write_text(json.dumps({"shared": shared, "arms": GROUPS}, indent=1) + "\n")

    def run(arm: str, seed: int) -> Curve:
        settings = shared | ARMS[arm] | {"seed": seed, "model_name_or_path": args.model, "dataset_name": str(prompts)}
        if settings.get("action_rule") == "constituency":
            settings["parser"] = args.parser
        return learn(settings, args.work / f"{list(ARMS).index(arm)}-{seed}")

    arms = args.arms or [arm for group in args.groups for arm in GROUPS[group]]
    arms = [arm for arm in arms if arm != "parsing" or args.parser]
    for curves in run_all(HERE / "curves.jsonl", arms, args.seeds, run):
        (HERE / "table.md").write_text(table(curves) + "\n")
    panels = {
        title: {arm: [by_step(curve) for curve in of_arm(curves, arm)] for arm in chosen}
        for title, chosen in (
            (
                "macro actions",
                ["token", "ngram-3", "ngram-5", "ngram-10", "response", "perplexity", "random", "parsing"],
            ),
            ("controls", ["token", "ngram-5", *[arm for arm in GROUPS["actions"] if "," in arm], "rloo"]),
        )
    }
    picture(HERE / "curves.png", panels, x="PPO step", y="VADER score of the sampled answers")
    print(table(curves))


if __name__ == "__main__":
    main()
