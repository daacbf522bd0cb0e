"""What the benchmarks of PPO start from: a model, a reward model with a head on its frozen trunk, and settings."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from policy.ppo_config import PPOConfig
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.card import RewardModelCard
from reward_models.checkpoints import load_classifier
from segrew.chat import ChatFormat
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint
from segrew.segmentation import SegmentationConfig
from segrew.tiny_model import make_tiny_model

RULE = SegmentationConfig(rule="entropy", threshold=3.0)


@contextmanager
def models(quick: bool) -> Iterator[tuple[str, str]]:
    """Name of the policy, and a directory with a reward model: a random head, whose cost is that of any other."""
    with tempfile.TemporaryDirectory() as folder:
        name = str(make_tiny_model(Path(folder) / "model", steps=0)) if quick else EMBEDDED_MODEL
        torch.manual_seed(0)
        model = load_classifier(name, new_head=True, dtype=torch.float32)
        chat = ChatFormat.from_tokenizer(load_tokenizer(name))
        segmenter = model_fingerprint(load_causal_lm(name, dtype=torch.float32))
        card = RewardModelCard(RULE, name, segmenter, chat.fingerprint, trunk_is_segmenter=True)
        normalizer = LocationNormalizer.from_parameters(0.1, 0.0, 0.0, 1.0, fingerprint=card.fingerprint)
        SegmentRewardModel(model, chat, card, normalizer).save_pretrained(Path(folder) / "rm")
        del model
        yield name, str(Path(folder) / "rm")


def settings(model: str, reward_model: str, output: str, **changes: Any) -> PPOConfig:
    """Segment rewards and segment actions, LoRA, one update a step."""
    fixed: dict[str, Any] = {"model_name_or_path": model, "reward_model_path": reward_model, "output_dir": output}
    fixed |= {"use_peft": True, "action_rule": "entropy", "save_steps": 0, "learning_rate": 1e-4}
    return PPOConfig(**fixed | changes)
