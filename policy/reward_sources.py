"""Where rewards come from: reward models, on the policy's own ids or on its text, and functions; each with a weight."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policy.backbone import hold_once
from policy.ppo_config import PPOConfig
from policy.readings import Answered, Reading, RewardSource, Scores, Units
from policy.reward_functions import FunctionReward, load_function
from policy.roles import Roles, check_same_tokens
from policy.rollout import in_micro_batches
from policy.scoring import Axes, normalizer_of
from policy.text_rewards import TextModelReward
from reward_models import LocationNormalizer, SegmentRewardModel
from segrew.conversations import Conversations
from segrew.segmentation import Segmentation


@dataclass(frozen=True)
class ModelReward:
    """A reward model that reads the ids the policy drew.

    Args:
        terminal: one reward, the model's score, at the end; else one for each of the run's reward units.
        max_tokens: of one pass, each prompt counted once.
        own_segmenter: its rule reads a model that the run does not cut by.
    """

    name: str
    model: SegmentRewardModel
    terminal: bool
    normalizer: LocationNormalizer | None
    max_tokens: int
    own_segmenter: bool = False

    @torch.no_grad()
    def read(self, answered: Answered, units: Units) -> Reading:
        """Read rewards at the run's reward units, and the score at the model's own."""
        conversations = answered.conversations
        own, outputs = units.cuts.get(self.model.segmentation), units.outputs.get(self.name)
        if own is None or self.own_segmenter:
            own, outputs = self._segment_and_output(conversations)
        elif outputs is None:
            (outputs,) = in_micro_batches(lambda part: (self.model.outputs(part),), conversations, self.max_tokens)
        scores = self.model.read(conversations, own, outputs).scores
        if self.terminal:
            return Reading(self.name, units.whole, scores[:, None], scores[:, None], scores, "last")
        raw = self.model.read(conversations, units.readings, outputs).rewards
        rewards = raw if self.normalizer is None else self.normalizer.normalize(raw, units.readings)
        return Reading(self.name, units.readings, raw, rewards, scores)

    def _segment_and_output(self, conversations: Conversations) -> tuple[Segmentation, Float[Tensor, "b t k"]]:
        def compute(part: Conversations) -> tuple[Tensor, Tensor]:
            cut, outputs = self.model.segment_and_output(part)
            return cut.ids + 1, outputs  # 0 is padding

        ids, outputs = in_micro_batches(compute, conversations, self.max_tokens)
        return Segmentation(ids - 1), outputs


def load_sources(config: PPOConfig, roles: Roles, axes: Axes) -> list[RewardSource]:
    """Everything that the policy is paid by: the reward model, further ones, functions.

    Raises:
        ValueError: a model is missing, reads other tokens or lacks a normalizer; a function is not found.
    """
    sources: list[RewardSource] = []
    for path in filter(None, [config.reward_model_path, *config.extra_reward_models]):
        first = path == config.reward_model_path
        model = roles.reward_model if first else _load_model(path, roles)
        assert model is not None
        if config.reward_tokens == "text":
            normalizer = None if axes.terminal else normalizer_of(config, path, model, model.segmentation)
            sources.append(
                TextModelReward(path, model, roles.chat, axes.terminal, normalizer, config.max_tokens_per_batch)
            )
            continue
        if not first:
            check_same_tokens(roles.chat, model, path, config.model_name_or_path)
        roles.read_along(path, model)
        cut_by = roles.cut_by
        normalizer = None if axes.terminal else normalizer_of(config, path, model, axes.rewards, cut_by)
        other = model.segmentation.needs_model and model.segmenter_fingerprint not in ("", cut_by)
        sources.append(ModelReward(path, model, axes.terminal, normalizer, config.max_tokens_per_batch, other))
    return sources + [FunctionReward(name, load_function(name, config), roles.chat) for name in config.reward_functions]


def load_evaluators(config: PPOConfig, roles: Roles) -> list[RewardSource]:
    """What judges evaluation answers and is never optimized; reward models read the answers' text."""
    models: list[RewardSource] = [
        TextModelReward(path, _load_model(path, roles), roles.chat, True, None, config.max_tokens_per_batch)
        for path in config.eval_reward_models
    ]
    return models + [
        FunctionReward(name, load_function(name, config), roles.chat) for name in config.eval_reward_functions
    ]


def models_of(sources: list[RewardSource]) -> dict[str, nn.Module]:
    """The reward models of sources, by name."""
    return {s.name: s.model.model for s in sources if isinstance(s, ModelReward | TextModelReward)}


def _load_model(path: str, roles: Roles) -> SegmentRewardModel:
    device = next(roles.policy.parameters()).device
    model = SegmentRewardModel.from_pretrained(Path(path), device=device)
    model.model.requires_grad_(False)
    hold_once(model.model, roles.reference)
    return model


def read_rewards(
    sources: list[RewardSource], weights: list[float], answered: Answered, units: Units, *, skip_bad: bool = False
) -> Scores:
    """Let every source read a batch.

    Args:
        skip_bad: mark answers without a finite reward and give them zeros; else they are an error.

    Raises:
        ValueError: naming sample and source; nothing has been updated by then.
    """
    readings: list[Reading] = []
    for source in sources:
        reading = source.read(answered, units)
        if not readings and isinstance(source, TextModelReward):
            units = units.read_at(reading.segmentation)
        readings.append(reading)
    bad = torch.stack([reading.bad for reading in readings]).any(0)
    if not skip_bad:
        for source, reading in zip(sources, readings, strict=True):
            refuse_non_finite(reading, answered.texts, of_function=isinstance(source, FunctionReward))
    return Scores(tuple(r.without(bad) for r in readings), tuple(weights or [1.0] * len(sources)), bad)


def refuse_non_finite(reading: Reading, texts: list[str], *, of_function: bool = False) -> None:
    """Stop before a bad reward poisons the mean, the whitening and then the weights.

    Raises:
        ValueError: naming sample and source.
    """
    if reading.bad.any():
        row = int(reading.bad.nonzero()[0])
        values = reading.rewards[row]
        unit = int((~values.isfinite()).nonzero()[0]) if not values.isfinite().all() else 0
        look = (
            "return a number there" if of_function else "`segrew score` shows what the reward model says of that text"
        )
        raise ValueError(
            f"{reading.source} gave the reward {values[unit].item()} to unit {unit} of sample {row} of this step "
            f"({texts[row][:60]!r}); nothing was updated; {look}, or pass "
            "--skip_bad_rows true to leave such answers out and count them."
        )
