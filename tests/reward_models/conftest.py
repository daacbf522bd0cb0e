"""A scorer of a few thousand random weights on the byte tokenizer, for any rule."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from reward_models.card import RewardModelCard
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import model_fingerprint
from segrew.segmentation import SegmentationConfig


@pytest.fixture(scope="session")
def build_scorer(build_byte_tokenizer, build_scorer_config) -> Callable:
    """Return a reward model with random weights; its segmenter is a causal model of its own."""

    def build(rule: str = "response", *, threshold: float | None = None, tokenizer=None, config=None, **card):
        torch.manual_seed(0)
        config = config or build_scorer_config()
        model = LlamaForSequenceClassification(config).eval()
        segmenter = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for weight in [*model.parameters(), *segmenter.parameters()]:
                weight.add_(0.2 * torch.randn_like(weight))
            segmenter.lm_head.weight.mul_(3)  # so that entropies differ
        chat = ChatFormat.from_tokenizer(tokenizer or build_byte_tokenizer(), "raw")
        card = RewardModelCard(
            segmentation=SegmentationConfig(rule=rule, threshold=threshold),
            base_model="in memory",
            segmenter_fingerprint=model_fingerprint(segmenter),
            tokenizer_fingerprint=chat.fingerprint,
            **card,
        )
        return SegmentRewardModel(model, chat, card, segmenter=segmenter)

    return build
