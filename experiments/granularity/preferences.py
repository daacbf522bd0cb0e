"""Preference pairs labelled by VADER, and the reward models of four granularities made of them."""

from pathlib import Path
from typing import Any

import torch
from stories import HELD_OUT_OPENINGS, MORE_OPENINGS, OPENINGS, prompts, sentiment, write_rows

from policy.rollout import Sampling, sample_answers
from reward_models.calibrate import main as calibrate
from reward_models.card import RewardModelCard
from reward_models.train import main as train_rm
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.run_directory import read_json

NEW_TOKENS = 32
RULES: dict[str, list[str]] = {
    "response": [], "sentence": [], "entropy": ["--target_length", "4"], "token": [],
}  # fmt: skip
TRAINING = [
    "--chat_template", "raw", "--aggregator", "mean", "--read_position", "content", "--tune", "full",
    "--learning_rate", "1e-3", "--num_train_epochs", "2", "--per_device_train_batch_size", "32", "--max_length", "128",
    "--bf16", "false", "--num_print_samples", "0", "--save_strategy", "no", "--disable_tqdm", "true",
    "--overwrite_output_dir", "true",
]  # fmt: skip


def sample_pairs(model_name: str, texts: list[str], answers: int, seed: int) -> list[dict[str, Any]]:
    """Answer each prompt several times and pair the answers: VADER says which one is chosen. Ties are left out."""
    model = load_causal_lm(model_name)
    chat = ChatFormat.from_tokenizer(load_tokenizer(model_name), "raw")
    repeated = [text for text in texts for _ in range(answers)]
    ids = [chat.prompt_ids([{"role": "user", "content": text}]) for text in repeated]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, batch_size=256)
    drawn = sample_answers(model, chat, ids, sampling, torch.Generator().manual_seed(seed), "Answering").texts
    scored = [(sentiment(text), text) for text in drawn]
    rows = []
    for i in range(0, len(scored), 2):
        (low, rejected), (high, chosen) = sorted(scored[i : i + 2])
        if high > low and rejected.strip():
            rows.append({"prompt": repeated[i], "chosen": chosen, "rejected": rejected, "gold": [high, low]})
    return rows


def write_preferences(model_name: str, work: Path) -> None:
    """Write training pairs, and pairs of other openings to judge the reward models by."""
    for name, openings, answers in (("pairs", OPENINGS + MORE_OPENINGS, 24), ("held_out_pairs", HELD_OUT_OPENINGS, 12)):
        path = work / f"{name}.jsonl"
        if not path.exists():
            write_rows(path, sample_pairs(model_name, prompts(openings), answers, seed=len(openings)))


def train_reward_models(model_name: str, work: Path) -> dict[str, dict[str, Any]]:
    """Train and calibrate a reward model for each rule that has none yet; return what is known of each."""
    write_preferences(model_name, work)
    pairs, held_out = (str(work / f"{name}.jsonl") for name in ("pairs", "held_out_pairs"))
    found = {}
    for rule, flags in RULES.items():
        path = work / f"rm-{rule}"
        if not (path / "normalizer.json").exists():
            data = ["--dataset_name", pairs, "--eval_dataset_name", held_out, "--output_dir", str(path)]
            train_rm(["--model_name_or_path", model_name, "--rule", rule, *flags, *data, *TRAINING])
            calibrate(["--reward_model", str(path), "--dataset_name", pairs, "--max_pairs", "1000"])
        card, evaluation = RewardModelCard.load(path), read_json(path / "evaluation.json")
        normalizer = read_json(path / "normalizer.json")
        found[rule] = {
            "label": card.segmentation.label, "threshold": card.segmentation.threshold,
            **{name: evaluation[name] for name in ("accuracy", "ci95", "n", "train_pairs", "length_baseline")},
            "normalizer": {name: normalizer[name] for name in ("w_mu", "w_sigma", "b_mu", "b_sigma", "r2")},
        }  # fmt: skip
    return found
