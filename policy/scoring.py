"""Reading the reward model at the units of one axis, and cutting the actions of the other."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from policy.ppo_config import PPOConfig
from policy.roles import Roles
from policy.rollout import Rollout
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.segment_reward_model import Readings
from segrew.language_models import micro_batches
from segrew.segmentation import Segmentation, SegmentationConfig, segment, segment_by_response


@dataclass(frozen=True)
class Axes:
    """The two axes of a run: where rewards are read, and over which units advantages are computed.

    Args:
        rewards: the rule of the reward units. terminal: one reward, the reward model's score, at the end.
        actions: the rule of the action units.
        normalizer: standardizes unit rewards; None to leave them as they are.
    """

    rewards: SegmentationConfig
    terminal: bool
    actions: SegmentationConfig
    normalizer: LocationNormalizer | None

    @classmethod
    def from_config(cls, config: PPOConfig, reward_model: SegmentRewardModel) -> "Axes":
        """Resolve both rules against the reward model.

        Raises:
            ValueError: a rule lacks its threshold or its parser, a setting is given that no rule reads, or the
                normalizer is missing or was fitted for another rule.
        """
        own = reward_model.segmentation
        terminal = config.reward_rule == "terminal"
        rewards = own if config.reward_rule in (None, "terminal") else _rule(config.reward_rule, config, own)
        actions = _rule(config.action_rule, config, own)
        of_flags = [rule for rule in (rewards, actions) if rule is not own]
        config.refuse_unread(of_flags, {"entropy_threshold": "threshold"})
        for rule in (rewards, actions):
            rule.software()  # refuses what is not installed
        actions = replace(actions, compat=None)  # every token acts, the stop token too
        return cls(rewards, terminal, actions, None if terminal else _normalizer(config, reward_model, rewards))


def _rule(name: str, config: PPOConfig, own: SegmentationConfig) -> SegmentationConfig:
    if name == "entropy":
        threshold = config.entropy_threshold
        if threshold is None and own.rule == "entropy":
            return own
        if threshold is None:
            raise ValueError(
                f"an entropy rule needs a threshold, and the reward model (rule {own.label}) names none; pass "
                "--entropy_threshold in nats (`segrew segment --target_length L` finds one)."
            )
        return config.rule_named("entropy", threshold=threshold)
    return config.rule_named(name)


def _normalizer(
    config: PPOConfig, reward_model: SegmentRewardModel, rule: SegmentationConfig
) -> LocationNormalizer | None:
    path, normalizer = config.reward_model_path, reward_model.normalizer
    if config.normalizer == "none":
        return None
    if normalizer is None:
        if rule.rule == "response":
            return None  # a single reward a response: there are no locations to compare
        raise ValueError(
            f"{path} has no normalizer.json, and rewards read early and late in a response do not compare without "
            "one; run `segrew calibrate` on it, or pass --normalizer none."
        )
    fingerprint = rule.fingerprint(
        segmenter=reward_model.segmenter_fingerprint,
        tokenizer=reward_model.chat.fingerprint,
        read_position=reward_model.read_position,
    )
    normalizer.require(fingerprint, rule=rule.label, source=f"{path}/normalizer.json")
    if config.normalizer is not None:
        normalizer = normalizer.with_mode(config.normalizer)
    return None if normalizer.mode == "none" else normalizer


@dataclass(frozen=True)
class Units:
    """A batch of rollouts under the reference: its log-probabilities, and the units of both axes.

    Args:
        ref_logprobs: at the sampling temperature.
        own: units of the reward model's own rule, for its score.
        readings: units that the reward model is read at. rewards: units that rewards are spread over, the same
            but for a terminal reward.
        actions: units that advantages are computed over.
    """

    ref_logprobs: Float[Tensor, "b t"]
    own: Segmentation
    readings: Segmentation
    rewards: Segmentation
    actions: Segmentation


@dataclass(frozen=True)
class Scores:
    """What the reward model said.

    Args:
        scores: e(x, y), by the reward model's own rule and aggregator.
        readings: raw rewards at `Units.readings`.
        rewards: rewards of `Units.rewards`, normalized if there is a normalizer.
    """

    scores: Float[Tensor, "b"]
    readings: Float[Tensor, "b r"]
    rewards: Float[Tensor, "b s"]


def cut_units(rollout: Rollout, roles: Roles, axes: Axes, config: PPOConfig, generator: torch.Generator) -> Units:
    """Run the reference once over the answers: its log-probabilities for the KL, its entropies for the cuts.

    Another pass is made only where the reward model names another segmenter, or where perplexity units need
    log-probabilities at temperature 1 and sampling has another.
    """
    conversations, batch_size = rollout.conversations, config.local_rollout_forward_batch_size
    ref_logprobs, entropy = roles.reference_statistics(
        conversations, temperature=config.temperature, batch_size=batch_size
    )
    own, logprobs = roles.reward_model.segmentation, ref_logprobs
    rules = (own, axes.rewards, axes.actions)
    other_segmenter = roles.segmenter is not None and any(rule.needs_model for rule in rules)
    if other_segmenter or (any(rule.rule == "perplexity" for rule in rules) and config.temperature != 1):
        logprobs, entropy = roles.segmenter_statistics(conversations, batch_size=batch_size)
    texts = roles.chat.response_texts(conversations.responses)
    inputs: dict[str, Any] = {"entropy": entropy, "logprobs": logprobs, "texts": texts, "generator": generator}
    cuts: dict[SegmentationConfig, Segmentation] = {}
    for rule in rules:
        if rule not in cuts:
            cuts[rule] = segment(rule, rollout.mask, **inputs, ended=rollout.ended)
    readings = cuts[axes.rewards]
    return Units(
        ref_logprobs=ref_logprobs,
        own=cuts[own],
        readings=readings,
        rewards=segment_by_response(rollout.mask) if axes.terminal else readings,
        actions=cuts[axes.actions],
    )


@torch.no_grad()
def score_rollout(rollout: Rollout, units: Units, roles: Roles, axes: Axes, config: PPOConfig) -> Scores:
    """Read the reward model and normalize by location.

    Raises:
        ValueError: a reward is NaN or infinite; nothing has been updated by then.
    """
    model, conversations = roles.reward_model, rollout.conversations

    def read(segmentation: Segmentation) -> Readings:
        rewards = torch.zeros(segmentation.unit_mask.shape, device=segmentation.ids.device)
        scores = rewards.new_zeros(len(rewards))
        for rows in micro_batches(conversations, config.local_rollout_forward_batch_size):
            part = conversations.select(rows)
            found = model.read(part, take(segmentation, rows, max(part.lengths)))
            rewards[rows], scores[rows] = found.rewards, found.scores
        refuse_non_finite(rewards, rollout, f"the reward model in {config.reward_model_path}")
        return Readings(rewards, scores)

    found = read(units.readings)
    own = found if units.own is units.readings else read(units.own)
    readings, scores = found.rewards, own.scores
    if axes.terminal:
        return Scores(scores, readings, scores[:, None])
    if axes.normalizer is None:
        return Scores(scores, readings, readings)
    return Scores(scores, readings, axes.normalizer.normalize(readings, units.readings))


def take(segmentation: Segmentation, rows: list[int], width: int) -> Segmentation:
    """Some rows of a segmentation, as wide as their longest response."""
    return Segmentation(segmentation.ids[rows][:, :width], segmentation.size)


def refuse_non_finite(rewards: Float[Tensor, "b s"], rollout: Rollout, source: str) -> None:
    """Stop before a bad reward poisons the mean, the whitening and then the weights.

    Raises:
        ValueError: naming sample and source.
    """
    bad = ~rewards.isfinite()
    if bad.any():
        row, unit = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{source} gave the reward {rewards[row, unit].item()} to unit {unit} of sample {row} of this step "
            f"({rollout.texts[row][:60]!r}); nothing was updated. `segrew score` shows what it says of that text."
        )


def sample_rows(
    step: int, split: str, prompts: list[str], rollout: Rollout, units: Units, scores: Scores, roles: Roles, axes: Axes
) -> list[dict[str, Any]]:
    """Describe the first answers of a batch, segment by segment, as lines of samples.jsonl."""
    rows = list(range(len(prompts)))
    part = rollout.conversations.select(rows)
    readings = Readings(scores.readings[rows], scores.scores[rows])
    described = roles.reward_model.describe(take(units.readings, rows, max(part.lengths)), readings, part)
    lines = []
    for row, record in enumerate(described):
        segments = [vars(s) | {"normalized": None} for s in record.segments]
        if axes.normalizer is not None:
            for segment_, normalized in zip(segments, scores.rewards[row].tolist(), strict=False):
                segment_["normalized"] = normalized
        lines.append(
            {
                "step": step,
                "split": split,
                "prompt": prompts[row],
                "response": "".join(s.text for s in record.segments),
                "score": scores.scores[row].item(),
                "segments": segments,
            }
        )
    return lines
