"""Terminal or dense rewards on a real small model and real pairs: SmolLM2-135M, PPO with LoRA, two arms.

    python experiments/real_pairs/run.py --files PAIRS.jsonl.gz --seeds 2

The pairs are cut by prompt: three tenths train the two reward models that PPO is paid by (a head each on the frozen
trunk: one reads the whole response, one its entropy segments), three tenths a judge that is never optimized, the rest
are prompts for PPO and for evaluation. Answers end after 48 tokens: the reward models see only beginnings of answers.
An arm and seed that is finished is not run again. Writes results.jsonl, reward_models.json, settings.json and table.md.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from curves import Curve, at, by_kl, cell, keep_reward_models, learn, markdown, of_arm, pace, paired, run_all  # noqa: E402
from stories import write_rows  # noqa: E402

from reward_models.calibrate import main as calibrate  # noqa: E402
from reward_models.train import main as train_rm  # noqa: E402
from segrew.chat import ChatFormat  # noqa: E402
from segrew.embedded_model import EMBEDDED_MODEL  # noqa: E402
from segrew.language_models import load_tokenizer  # noqa: E402
from segrew.preferences import PreferencePair, load_preferences  # noqa: E402
from segrew.run_directory import read_json  # noqa: E402

RULES: dict[str, list[str]] = {
    "response": ["--rule", "response"],
    "entropy": ["--rule", "entropy", "--target_length", "4", "--aggregator", "softmax"],
    "judge": ["--rule", "response"],
}
ARMS: dict[str, dict[str, Any]] = {
    "bandit": {"reward_model_path": "response", "reward_rule": "response", "interpolation": "last"},
    "segment": {"reward_model_path": "entropy", "reward_rule": "entropy"},
}
SHARED: dict[str, Any] = {
    "use_peft": True, "critic_init": "reward_model", "rollout_batch_size": 16, "per_device_train_batch_size": 8,
    "max_prompt_length": 64, "max_new_tokens": 48, "num_ppo_epochs": 1, "num_mini_batches": 2, "kl_coef": 0.05,
    "learning_rate": 3e-4, "critic_learning_rate": 1e-3, "total_steps": 16, "eval_samples": 24, "eval_steps": 4,
    "save_steps": 0, "samples_per_step": 1,
}  # fmt: skip


def write_parts(files: list[str], model: str, work: Path, pairs: int) -> None:
    """Write the pairs of the reward models and of the judge, and prompts, none of which two parts share."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(model))
    by_prompt: dict[str, list[PreferencePair]] = {}
    for pair in (pair for file in files for pair in load_preferences(file).pairs):
        by_prompt.setdefault(json.dumps(pair.prompt), []).append(pair)
    prompts = sorted(by_prompt)
    random.Random(0).shuffle(prompts)
    cuts = [0, 3 * len(prompts) // 10, 6 * len(prompts) // 10, len(prompts)]
    for name, k in (("reward", 0), ("judge", 1)):
        rows = [
            {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            for prompt in prompts[cuts[k] : cuts[k + 1]]
            for pair in by_prompt[prompt]
        ][: pairs + pairs // 5]
        write_rows(work / f"{name}.jsonl", rows[:pairs])
        write_rows(work / f"{name}_held_out.jsonl", rows[pairs:])
    short = [
        prompt for prompt in map(json.loads, prompts[cuts[2] :])
        if len(chat.prompt_ids(prompt)) <= SHARED["max_prompt_length"]
    ]  # fmt: skip
    for name, rows in (("held_out", short[: SHARED["eval_samples"]]), ("prompts", short[SHARED["eval_samples"] :])):
        write_rows(work / f"{name}.jsonl", [{"prompt": prompt} for prompt in rows])


def train_reward_models(model: str, work: Path) -> dict[str, Any]:
    """Train and calibrate those that are missing; return what is known of each."""
    found = {}
    for name, flags in RULES.items():
        path, data = work / f"rm-{name}", work / ("judge" if name == "judge" else "reward")
        if not (path / "normalizer.json").exists():
            train_rm(
                [
                    "--model_name_or_path", model, *flags, "--tune", "head", "--read_position", "content",
                    "--max_length", "256", "--overlong", "truncate_response", "--output_dir", str(path),
                    "--dataset_name", f"{data}.jsonl", "--eval_dataset_name", f"{data}_held_out.jsonl",
                    "--num_print_samples", "0", "--overwrite_output_dir", "true",
                ]
            )  # fmt: skip
            calibrate(["--reward_model", str(path), "--dataset_name", f"{data}.jsonl", "--max_pairs", "200"])
        evaluation = read_json(path / "evaluation.json")
        found[name] = {key: evaluation[key] for key in ("accuracy", "ci95", "n", "train_pairs", "length_baseline")}
    return found


def judge_of(curve: Curve) -> str:
    """The name of the one evaluator that no arm is paid by."""
    return next(name for name in curve["held_out"] if name != "score")


def table(curves: list[Curve]) -> str:
    """The judge's score before and after, after equal steps and at the KL that every run comes to."""
    nats = int(10 * min(max(kl for kl, _ in by_kl(curve, judge_of(curve))) for curve in curves)) / 10

    def gain(curve: Curve) -> float:
        judged = curve["held_out"][judge_of(curve)]
        return judged[-1][1] - judged[0][1]

    def gain_at(curve: Curve) -> float | None:
        judged = by_kl(curve, judge_of(curve))
        score = at(judged, nats)
        return None if score is None else score - judged[0][1]

    rows = []
    for arm in (arm for arm in ARMS if of_arm(curves, arm)):
        found = of_arm(curves, arm)
        own = [curve["held_out"]["score"] for curve in found]
        rows.append(
            (
                arm, len(found), cell([gain(curve) for curve in found]),
                cell([value for curve in found if (value := gain_at(curve)) is not None]),
                cell([values[-1][1] - values[0][1] for values in own]),
                cell([statistics.fmean(curve["kl_answer"][-4:]) for curve in found], 1),
                cell([statistics.fmean(curve["length"][-4:]) for curve in found], 1),
                f"{statistics.median(map(pace, found)):.1f}",
            )
        )  # fmt: skip
    header = (
        "arm",
        "seeds",
        "judge's gain",
        f"at {nats} nats",
        "its own reward's gain",
        "final KL",
        "tokens",
        "s/step",
    )
    lines = [markdown(header, rows)]
    for title, value in (("after equal steps", gain), (f"at {nats} nats", gain_at)):
        values = paired(curves, "segment", "bandit", value)
        lines.append(f"segment less bandit, {title}: {', '.join(f'{value:+.3f}' for value in values)}")
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--pairs", type=int, default=500, help="of each reward model; a fifth more are held out")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/real_pairs"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    write_parts(args.files, args.model, args.work, args.pairs)
    known = train_reward_models(args.model, args.work)
    keep_reward_models(HERE, known)
    (HERE / "settings.json").write_text(json.dumps({"shared": SHARED, "arms": ARMS, "rules": RULES}, indent=1) + "\n")

    def run(arm: str, seed: int) -> Curve:
        settings = SHARED | ARMS[arm] | {"model_name_or_path": args.model, "seed": seed}
        settings["reward_model_path"] = str(args.work / f"rm-{settings['reward_model_path']}")
        settings |= {
            "dataset_name": str(args.work / "prompts.jsonl"), "eval_dataset": str(args.work / "held_out.jsonl"),
            "eval_reward_models": [str(args.work / "rm-judge")],
        }  # fmt: skip
        return learn(settings, args.work / f"{arm}-{seed}")

    for curves in run_all(HERE / "results.jsonl", ARMS, args.seeds, run):
        if curves:
            (HERE / "table.md").write_text(table(curves) + "\n")
    print((HERE / "table.md").read_text())


if __name__ == "__main__":
    main()
