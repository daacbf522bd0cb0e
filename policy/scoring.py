"""The two axes of a run resolved against its reward model, and answers cut into the units of both."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from policy.ppo_checks import n_by_step
from policy.ppo_config import PPOConfig
from policy.readings import Units
from policy.roles import Roles
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.normalizer_parameters import NEXT
from segrew import processes
from segrew.conversations import Conversations
from segrew.segmentation import Segmentation, SegmentationConfig, segment

WHOLE = SegmentationConfig(rule="response")


@dataclass(frozen=True)
class Axes:
    """The two axes of a run: where rewards are read, and over which units advantages are computed.

    Args:
        rewards: the rule of the reward units. terminal: one reward, the reward model's score, at the end.
        actions: the rule of the action units. n_schedule: (first step, n) where its n changes over training.
        normalizer: standardizes unit rewards; None to leave them as they are.
    """

    rewards: SegmentationConfig
    terminal: bool
    actions: SegmentationConfig
    normalizer: LocationNormalizer | None
    n_schedule: tuple[tuple[int, int | None], ...] = ((0, 5),)

    @classmethod
    def from_config(cls, config: PPOConfig, reward_model: SegmentRewardModel | None) -> "Axes":
        """Resolve both rules against the reward model; without one a reward is of the whole answer by default.

        Raises:
            ValueError: a rule lacks its threshold or its parser, a setting is given that no rule reads, or the
                normalizer is missing or was fitted for another rule.
        """
        terminal = config.reward_rule == "terminal"
        theirs = WHOLE if reward_model is None else reward_model.segmentation
        by_text = config.reward_tokens == "text" and reward_model is not None
        if by_text and config.reward_rule not in (None, "terminal", theirs.rule):
            raise ValueError(
                f"--reward_rule {config.reward_rule}: with --reward_tokens text a reward model cuts by its own rule "
                f"({theirs.label}); leave the flag out, or take terminal."
            )
        own = WHOLE if by_text else theirs  # its nats mean nothing to the policy's tokens
        rewards = own if by_text or config.reward_rule in (None, "terminal") else _rule(config.reward_rule, config, own)
        actions = _rule(config.action_rule, config, own)
        of_flags = [rule for rule in (rewards, actions) if rule is not own]
        config.refuse_unread(of_flags, {"entropy_threshold": "threshold"})
        for rule in (rewards, actions):
            rule.software()  # refuses what is not installed
        actions = replace(actions, compat=None)  # every token acts, the stop token too
        normalizer = None
        if reward_model is not None and not terminal:
            read_by = theirs if by_text else rewards
            normalizer = normalizer_of(config, config.reward_model_path, reward_model, read_by)
        return cls(rewards, terminal, actions, normalizer, tuple(n_by_step(config)))

    def at(self, step: int) -> "Axes":
        """The axes of one step."""
        if self.actions.rule != "ngram":
            return self
        n = next(n for first, n in reversed(self.n_schedule) if first <= step)
        return replace(self, actions=replace(self.actions, n=n))


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


def normalizer_of(
    config: PPOConfig, path: str, reward_model: SegmentRewardModel, rule: SegmentationConfig, cut_by: str | None = None
) -> LocationNormalizer | None:
    """The normalizer that a reward model's rewards go through when read under `rule`.

    Args:
        cut_by: fingerprint of the model that the run cuts by; default the reward model's own segmenter.

    Raises:
        ValueError: it is missing, or was fitted for another rule.
    """
    normalizer = reward_model.normalizer
    if config.normalizer == "none":
        return None
    if normalizer is None:
        if rule.rule == "response" and config.normalizer is None:
            return None  # a single reward a response: there are no locations to compare
        reason = "rewards read early and late in a response do not compare without one"
        reason = reason if config.normalizer is None else f"--normalizer {config.normalizer} asks for one"
        raise ValueError(
            f"{path} has no normalizer.json, and {reason}; run `segrew calibrate` on it, or pass --normalizer none."
        )
    own = reward_model.segmenter_fingerprint
    cut_by = own if cut_by is None or not own else cut_by
    fingerprint = rule.fingerprint(
        segmenter=cut_by,
        tokenizer=reward_model.chat.fingerprint,
        read_position=reward_model.read_position,
    )
    label = rule.label if cut_by == own else f"{rule.label} of the first reward model's segmenter"
    remedy = _to_its_own_rule(config, path, reread=cut_by != own or rule != reward_model.segmentation)
    normalizer.require(fingerprint, rule=label, source=f"{path}/normalizer.json", remedy=remedy)
    if config.normalizer is not None:
        normalizer = normalizer.with_mode(config.normalizer)
    return None if normalizer.mode == "none" else normalizer


def _to_its_own_rule(config: PPOConfig, path: str, *, reread: bool) -> str:
    """What lets a normalizer fit: a model read by its own rule was retrained, the others can be read by it."""
    if not reread:
        return f"{NEXT}, or take --normalizer none"
    if path == config.reward_model_path:
        return "--reward_rule null, which also undoes a --config file's, reads it by its own rule; or --normalizer none"
    return (
        "models reading ids share the first one's units: --reward_tokens text (with --reward_rule null) reads each by "
        "its own rule, --reward_rule terminal pays each one's score, --normalizer none adds raw rewards"
    )


def cut_units(
    conversations: Conversations,
    roles: Roles,
    axes: Axes,
    config: PPOConfig,
    generator: torch.Generator,
    further: tuple[SegmentationConfig, ...] = (),
) -> Units:
    """Run the reference once over the answers: its log-probabilities for the KL, its entropies for the cuts, and the
    readings of reward heads on its states.

    Another pass is made only where the reward model names another segmenter.

    Args:
        further: rules to cut by as well; an entropy rule without a threshold takes it from the answers of all
            processes, each of which then needs some.
    """
    rules = [axes.rewards, axes.actions, *further]
    if roles.reward_model is not None and config.reward_tokens == "ids":
        rules.insert(0, roles.reward_model.segmentation)
    max_tokens, temperatures = config.max_tokens_per_batch, [config.temperature]
    if config.temperature != 1 and any(rule.rule == "perplexity" for rule in rules):
        temperatures.append(1.0)
    found = roles.reference_pass(conversations, temperatures=temperatures, max_tokens=max_tokens)
    logprobs, entropy = found.logprobs[-1], found.entropy
    if roles.segmenter is not None and any(rule.needs_model for rule in rules):
        logprobs, entropy = roles.segmenter_statistics(conversations, max_tokens=max_tokens)
    mask, ended = (x.to(entropy.device) for x in (conversations.mask, conversations.ended))
    texts = roles.chat.response_texts(conversations.responses)
    inputs: dict[str, Any] = {"entropy": entropy, "logprobs": logprobs, "texts": texts, "generator": generator}

    def cut(rule: SegmentationConfig, ended: torch.Tensor | None) -> Segmentation:
        if rule.rule == "entropy" and rule.threshold is None:
            rule = rule.resolve(*processes.joined((entropy, mask), entropy.device))
        return segment(rule, mask, **inputs, ended=ended)

    cuts: dict[SegmentationConfig, Segmentation] = {}
    for rule in rules:
        if rule not in cuts:
            cuts[rule] = cut(rule, ended)
    # The released code knows no stop token.
    actions = cut(axes.actions, None) if config.compat else cuts[axes.actions]
    return Units(found.logprobs[0], cuts, cuts[axes.rewards], actions, found.outputs)


def take(segmentation: Segmentation, rows: list[int], width: int) -> Segmentation:
    """Some rows of a segmentation, as wide as their longest response."""
    return Segmentation(segmentation.ids[rows][:, :width], segmentation.size)
