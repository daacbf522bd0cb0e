"""Where to read the reward, and over which units to act? PPO with reward models of four granularities, judged by VADER.

    pip install vaderSentiment
    python experiments/granularity/run.py --model PATH_OF_A_SMALL_STORY_MODEL --seeds 5

Pairs sampled from the model are labelled by VADER, reward models are trained and calibrated on them (preferences.py),
and PPO with each is judged on held-out prompts by VADER itself, which it never optimizes (but in the arm `gold`), after
equally many steps and at an equal KL. Writes reward_models.json, settings.json, results.jsonl, table.md and pictures.
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

from curves import (  # noqa: E402
    Curve,
    Points,
    at,
    bars,
    by_kl,
    cell,
    keep_reward_models,
    learn,
    markdown,
    of_arm,
    pace,
    paired,
    picture,
    run_all,
)
from preferences import NEW_TOKENS, train_reward_models  # noqa: E402
from stories import HELD_OUT_OPENINGS, MORE_OPENINGS, OPENINGS, write_prompts  # noqa: E402

GOLD = "stories:vader"
Arms = dict[str, dict[str, Any]]
SEGMENT: dict[str, Any] = {"reward_model_path": "entropy", "reward_rule": "entropy"}
BANDIT: dict[str, Any] = {"reward_model_path": "response", "reward_rule": "response", "interpolation": "last"}
NGRAMS: dict[str, Any] = {"action_rule": "ngram", "n": 5, "ratio": "joint"}
WHOLE: dict[str, Any] = {"action_rule": "response", "ratio": "joint"}
GROUPS: dict[str, Arms] = {
    "granularity": {
        "gold": {"reward_model_path": "", "reward_functions": [GOLD]},
        "bandit": BANDIT,
        "sentence": {"reward_model_path": "sentence", "reward_rule": "sentence"},
        "token": {"reward_model_path": "token", "reward_rule": "token"},
        "segment": SEGMENT,
        "bandit as segment": {"reward_model_path": "response", "reward_rule": "entropy", "normalizer": "none"},
        "segment as bandit": {"reward_model_path": "entropy", "reward_rule": "terminal"},
        "bandit, 5-grams act": BANDIT | NGRAMS,
        "segment, 5-grams act": SEGMENT | NGRAMS,
        "segment, segments act": SEGMENT | {"action_rule": "entropy", "ratio": "joint"},
    },
    "normalizer": {
        "segment, none": SEGMENT | {"normalizer": "none"},
        "segment, global": SEGMENT | {"normalizer": "global"},
        "segment, last": SEGMENT | {"normalizer": "last"},
    },
    "interpolation": {
        "segment, at its last token": SEGMENT | {"interpolation": "last"},
        "segment, repeated": SEGMENT | {"interpolation": "repeat"},
    },
    "kl": {
        f"bandit, {name}, KL {weight}": BANDIT | actions | {"kl_coef": weight}
        for weight in (0.0, 0.1)
        for name, actions in (("tokens act", {}), ("5-grams act", NGRAMS), ("answers act", WHOLE))
    }
    | {"bandit, answers act": BANDIT | WHOLE}
    | {f"segment, tokens act, KL {weight}": SEGMENT | {"kl_coef": weight} for weight in (0.1, 0.3)},
}  # fmt: skip
ARMS: Arms = {name: settings for arms in GROUPS.values() for name, settings in arms.items()}
SHARED: dict[str, Any] = {
    "chat_template": "raw", "rollout_batch_size": 64, "local_rollout_forward_batch_size": 128,
    "per_device_train_batch_size": 16, "max_new_tokens": NEW_TOKENS, "num_ppo_epochs": 1, "num_mini_batches": 4,
    "kl_coef": 0.02, "learning_rate": 3e-4, "critic_learning_rate": 1e-3, "total_steps": 24,
    "eval_reward_functions": [GOLD], "eval_samples": 64, "eval_steps": 4, "save_steps": 0, "samples_per_step": 0,
    "bf16": False,
}  # fmt: skip


def gold(curve: Curve) -> float:
    """Held-out VADER score after the last steps: the mean of the last three evaluations."""
    return statistics.fmean(score for _, score in curve["held_out"][GOLD][-3:])


def final_kl(curve: Curve) -> float:
    """Nats an answer, over the last steps."""
    return statistics.fmean(curve["kl_answer"][-6:])


def by_step(curve: Curve) -> Points:
    """(step, held-out gold score)."""
    return [(step, score) for step, score in curve["held_out"][GOLD]]


def common_kl(curves: list[Curve], arms: Arms) -> float:
    """The largest KL, to a tenth of a nat, that nine of ten runs come to."""
    reached = sorted(max(kl for kl, _ in by_kl(curve, GOLD)) for curve in curves if curve["arm"] in arms)
    return int(10 * reached[len(reached) // 10]) / 10


def table(curves: list[Curve], arms: Arms, nats: float) -> str:
    """Gold score after equal steps and at equal KL, by arm."""
    rows = []
    for arm in arms:
        found = of_arm(curves, arm)
        if found:
            at_kl = [score for curve in found if (score := at(by_kl(curve, GOLD), nats)) is not None]
            reached = "" if len(at_kl) == len(found) else f" ({len(at_kl)} of {len(found)})"
            proxy = statistics.fmean(curve["held_out"]["score"][-1][1] for curve in found)
            start = statistics.fmean(curve["held_out"]["score"][0][1] for curve in found)
            rows.append(
                (
                    arm, len(found), cell([gold(curve) for curve in found]), cell(at_kl) + reached,
                    cell([final_kl(curve) for curve in found], 1), f"{start:.2f} → {proxy:.2f}",
                    cell([curve["length"][-1] for curve in found], 0),
                    f"{statistics.median(map(pace, found)):.2f}",
                )
            )  # fmt: skip
    header = (
        "arm", "seeds", "gold, equal steps", f"gold at {nats} nats", "final KL", "its own reward", "tokens", "s/step"
    )  # fmt: skip
    return markdown(header, rows)


def interaction(curves: list[Curve], nats: float) -> str:
    """The 2 × 2 of terminal or dense rewards and tokens or 5-grams: both effects and their interaction, over seeds."""
    lines = []
    for title, value in (("equal steps", gold), (f"{nats} nats", lambda curve: at(by_kl(curve, GOLD), nats))):
        effects = {
            "dense less terminal, tokens act": paired(curves, "segment", "bandit", value),
            "dense less terminal, 5-grams act": paired(curves, "segment, 5-grams act", "bandit, 5-grams act", value),
            "5-grams less tokens, terminal reward": paired(curves, "bandit, 5-grams act", "bandit", value),
            "5-grams less tokens, dense reward": paired(curves, "segment, 5-grams act", "segment", value),
        }
        tokens, grams = (effects[f"dense less terminal, {who} act"] for who in ("tokens", "5-grams"))
        if len(tokens) == len(grams):
            effects["interaction"] = [b - a for a, b in zip(tokens, grams, strict=True)]
        lines += [(title, name, len(values), cell(values)) for name, values in effects.items()]
    return markdown(("at", "effect on gold", "seeds", "mean [95 %]"), lines)


def report(curves: list[Curve]) -> str:
    """Write table.md and the pictures."""
    parts = []
    for name, arms in GROUPS.items():
        if not any(of_arm(curves, arm) for arm in arms):
            continue
        shown = arms if name in ("granularity", "kl") else {"segment": SEGMENT} | arms
        shown = (
            {arm: ARMS[arm] for arm in ("bandit", "bandit, 5-grams act", "segment")} | shown if name == "kl" else shown
        )
        nats = common_kl(curves, shown)
        parts += [f"## {name}", table(curves, shown, nats)]
        if name == "granularity":
            parts += ["## {tokens, 5-grams} × {terminal, dense}", interaction(curves, nats)]
            scores = {"equal steps": gold, f"at {nats} nats": lambda curve, nats=nats: at(by_kl(curve, GOLD), nats)}
            bars(HERE / "granularity.png", curves, shown, scores, y="held-out VADER score")
            panels = {
                title: {arm: [line(curve) for curve in of_arm(curves, arm)] for arm in names}
                for title, line, names in (
                    ("reward granularity", by_step, list(arms)[:7]),
                    ("action granularity", by_step, ["bandit", "segment", *list(arms)[7:]]),
                )
            }
            picture(HERE / "curves.png", panels, x="PPO step", y="held-out VADER score")
    text = "\n\n".join(parts)
    (HERE / "table.md").write_text(text + "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--work", type=Path, default=Path("runs/granularity"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    reward_models = train_reward_models(args.model, args.work)
    keep_reward_models(HERE, reward_models)
    (HERE / "settings.json").write_text(json.dumps({"shared": SHARED, "arms": GROUPS}, indent=1) + "\n")
    files = {
        "model_name_or_path": args.model,
        "dataset_name": str(write_prompts(args.work / "prompts.jsonl", OPENINGS + MORE_OPENINGS)),
        "eval_dataset": str(write_prompts(args.work / "held_out.jsonl", HELD_OUT_OPENINGS)),
    }

    def run(arm: str, seed: int) -> Curve:
        settings = SHARED | ARMS[arm] | files | {"seed": seed}
        if rule := settings["reward_model_path"]:
            settings["reward_model_path"] = str(args.work / f"rm-{rule}")
            if settings["reward_rule"] == "entropy":
                settings["entropy_threshold"] = reward_models["entropy"]["threshold"]
        return learn(settings, args.work / f"{list(ARMS).index(arm)}-{seed}")

    arms = [arm for group in args.groups for arm in GROUPS[group]]
    for curves in run_all(HERE / "results.jsonl", arms, args.seeds, run):
        report(curves)
    print(report(curves))


if __name__ == "__main__":
    main()
