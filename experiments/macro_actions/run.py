"""Do macro actions learn faster, and is it the macros or the longer effective lambda? A tiny model, a terminal reward.

    pip install vaderSentiment
    python experiments/macro_actions/run.py --model PATH_OF_A_SMALL_STORY_MODEL --seeds 8 --steps 30

Every arm is PPO with the same settings but for those in ARMS. An arm and seed that is finished is not run again, so an
interrupted run goes on. Writes curves.jsonl (mean score of the sampled answers at each step, wall time) and table.md.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
N = 5
MACRO = {"ratio": "joint"}
ARMS: dict[str, dict[str, Any]] = {
    "token": {},
    "token, lambda .99": {"lam": 0.99},
    "token, lambda .95^(1/5)": {"lam": 0.95 ** (1 / N)},
    "token, lambda 1": {"lam": 1.0},
    "ngram-3": {"action_rule": "ngram", "n": 3, **MACRO},
    "ngram-5": {"action_rule": "ngram", "n": N, **MACRO},
    "ngram-10": {"action_rule": "ngram", "n": 10, **MACRO},
    "response": {"action_rule": "response", **MACRO},
    "perplexity": {"action_rule": "perplexity", **MACRO},
    "ngram-5, token ratio": {"action_rule": "ngram", "n": N},
    "token, no whitening": {"whitening": "none"},
    "ngram-5, no whitening": {"action_rule": "ngram", "n": N, "whitening": "none", **MACRO},
    "rloo": {"advantage_estimator": "rloo", "action_rule": "response", "num_samples_per_prompt": 4},
}
SHARED: dict[str, Any] = {
    "reward_model_path": "", "reward_functions": ["sentiment:vader"], "chat_template": "raw",
    "rollout_batch_size": 64, "local_rollout_forward_batch_size": 64, "per_device_train_batch_size": 16,
    "max_new_tokens": 32, "num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.02, "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3, "save_steps": 0, "samples_per_step": 0, "bf16": False,
}  # fmt: skip
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Tim")
OPENINGS = (
    "Once upon a time, there was a girl called {}. One day she", "{} went to the park with a friend. They",
    "{} was sad because it was raining. Then", "{} saw a big dog. The dog", "One day, {} found a box. In the box",
    "{} did not want to share the toy. Mom said", "It was dark and {} was scared. But",
    "{} fell down and cried. A friend",
)  # fmt: skip


def write_prompts(path: Path) -> Path:
    texts = [opening.format(name) for opening in OPENINGS for name in NAMES]
    random.Random(0).shuffle(texts)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def curve(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm with one seed; return its scores and the seconds of training."""
    from policy.ppo import PPOConfig, train_policy

    settings = SHARED | ARMS[arm] | {"model_name_or_path": args.model, "seed": seed, "total_steps": args.steps}
    output = args.work / f"{list(ARMS).index(arm)}-{seed}"
    begun = time.perf_counter()
    train_policy(PPOConfig(**settings, dataset_name=str(args.work / "prompts.jsonl"), output_dir=str(output),
                           overwrite_output_dir=True))  # fmt: skip
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "arm": arm, "seed": seed, "steps": args.steps, "seconds": round(time.perf_counter() - begun, 1),
        "scores": [round(row["reward/score"], 4) for row in rows], "kl": [round(row["kl/k1"], 5) for row in rows],
    }  # fmt: skip


def smooth(scores: list[float], width: int = 5) -> list[float]:
    return [statistics.mean(scores[max(0, i - width + 1) : i + 1]) for i in range(len(scores))]


def steps_to(scores: list[float], target: float) -> int | None:
    """First step whose running mean of five reaches the target."""
    return next((i + 1 for i, score in enumerate(smooth(scores)) if score >= target), None)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over seeds."""
    chooser = random.Random(0)
    means = sorted(statistics.mean(chooser.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def table(curves: list[dict[str, Any]]) -> str:
    """Final score, steps and seconds to where token PPO ends, by arm."""
    token = [c for c in curves if c["arm"] == "token"]
    target = statistics.mean(statistics.mean(c["scores"][-10:]) for c in token)
    lines = [
        f"Target: {target:.3f}, the mean score of the last ten steps of token PPO at lambda .95 (all its seeds).", "",
        "| arm | seeds | score, last ten steps | reached the target | steps to it | seconds a step |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for arm in ARMS:
        found = [c for c in curves if c["arm"] == arm]
        if not found:
            continue
        finals = [statistics.mean(c["scores"][-10:]) for c in found]
        low, high = interval(finals)
        steps = [s for c in found if (s := steps_to(c["scores"], target)) is not None]
        when = f"{statistics.mean(steps):.0f} [{min(steps)}, {max(steps)}]" if steps else "never"
        pace = statistics.mean(c["seconds"] / c["steps"] for c in found)
        lines.append(
            f"| {arm} | {len(found)} | {statistics.mean(finals):.3f} [{low:.3f}, {high:.3f}] | {len(steps)} of "
            f"{len(found)} | {when} | {pace:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--work", type=Path, default=Path("runs/macro_actions"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    write_prompts(args.work / "prompts.jsonl")
    path = HERE / "curves.jsonl"
    curves = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(c["arm"], c["seed"]) for c in curves if c["steps"] == args.steps}
    for seed in range(args.seeds):
        for arm in args.arms:
            if (arm, seed) not in done:
                curves.append(curve(arm, seed, args))
                with path.open("a") as file:
                    file.write(json.dumps(curves[-1]) + "\n")
                (HERE / "table.md").write_text(table(curves) + "\n")
    print(table(curves))


if __name__ == "__main__":
    main()
