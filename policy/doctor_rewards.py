"""Checks of `segrew doctor` on a reward model: its head, its normalizer, and how others would read it."""

import math
from collections import defaultdict
from typing import Any

import torch

from policy.doctor_numbers import SAME, same
from policy.doctor_subject import DoctorConfig, Finding, Reader, Skip
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.score import Answer
from reward_models.scored_responses import ScoredResponse
from reward_models.segment_reward_model import NORMALIZER_FILE
from segrew.language_models import plain_model

TRAINED = 2 / 3  # accuracy on pairs from which a head is taken to be trained whatever its weights look like


def segmenter(reward_model: SegmentRewardModel) -> Finding:
    """The model whose entropies cut responses is the one of training."""
    if not reward_model.segmentation.needs_model:
        raise Skip(f"rule {reward_model.segmentation.label} needs none")
    reward_model.segmenter()
    return Finding("ok", f"{reward_model.card.base_model}, {reward_model.segmenter_fingerprint}")


def score_batches(reward_model: SegmentRewardModel, scores: list[ScoredResponse], answers: list[Answer]) -> Finding:
    """A response has the same score and units alone and among others."""
    few = answers[:6]
    alone = reward_model.score(
        [a.prompt for a in few], [a.response for a in few], batch_size=1, templates=[a.template for a in few]
    )
    pairs = list(zip(alone, scores, strict=False))
    worst = max(abs(one.score - other.score) / max(1.0, abs(other.score)) for one, other in pairs)
    cut = sum([s.end for s in one.segments] != [s.end for s in other.segments] for one, other in pairs)
    measured = f"scores {worst:.1e} apart, {cut} of {len(few)} cut differently"
    if worst <= SAME and not cut:
        return Finding("ok", measured, worst)
    remedy = "Load reward model and segmenter in float32: rounding moves entropies across the threshold in a batch."
    return Finding("warning" if cut else "fault", measured, worst, remedy)


def trained_head(reward_model: SegmentRewardModel, scores: list[ScoredResponse], answers: list[Answer]) -> Finding:
    """The head tells answers apart, and is no new one."""
    weight: Any = reward_model.head.weight
    width, spread = weight.numel(), weight.float().std().item()
    values = [record.score for record in scores]
    if max(values) - min(values) <= 1e-6 * max(1.0, abs(max(values))):
        remedy = "Train the head, or restore its weights: it gives every answer the same score."
        return Finding("fault", f"{len(values)} answers, one score ({values[0]:.3g})", 0.0, remedy)
    accuracy, pairs = _accuracy(answers, values)
    own = getattr(plain_model(reward_model.model).config, "initializer_range", None) or 0.02
    new = (own, 1 / (width + 1), 1 / math.sqrt(3 * width))  # of transformers, of segrew, of torch
    looks_new = any(abs(spread / start - 1) < 3 / math.sqrt(2 * width) for start in new)
    measured = f"weights of spread {spread:.2g}"
    measured += f", right in {accuracy:.0%} of {pairs} pairs" if pairs else ""
    if looks_new and not (pairs and accuracy >= TRAINED):
        remedy = "Check that it was trained (`segrew train-rm`): weights and pairs cannot be told from a new head's."
        return Finding("warning", measured, accuracy if pairs else spread, remedy)
    return Finding("ok", measured, accuracy if pairs else spread)


def _accuracy(answers: list[Answer], values: list[float]) -> tuple[float, int]:
    sides: dict[str, dict[str, float]] = defaultdict(dict)
    for answer, value in zip(answers, values, strict=True):
        sides[answer.id][answer.side] = value
    pairs = [pair for pair in sides.values() if {"chosen", "rejected"} <= set(pair)]
    return sum(pair["chosen"] > pair["rejected"] for pair in pairs) / max(len(pairs), 1), len(pairs)


@torch.no_grad()
def stock_reading(readers: list[Reader], reward_model: SegmentRewardModel) -> Finding:
    """Plain transformers, which finds the end of a row by its pad token, reads where segrew does."""
    reader = next(reader for reader in readers if reader.model is reward_model.model)
    rows = [p + r for p, r in zip(reader.conversations.prompts, reader.conversations.responses, strict=True)]
    model: Any = reward_model.model
    pad, width = plain_model(model).config.pad_token_id, max(map(len, rows))
    ids = torch.tensor([row + [pad or 0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    device = next(model.parameters()).device
    stock = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()[:, 0].cpu()
    ours = torch.stack([row[-1] for row in reader.read()])
    worst = ((stock - ours).abs().nan_to_num(nan=torch.inf).max() / ours.abs().max().clamp(min=1.0)).item()
    measured = f"{worst:.1e} apart, padding with id {pad}"
    remedy = "Set pad_token_id in config.json to a token that ends no answer; `save_pretrained` of segrew writes one."
    return same(worst, measured, remedy)


def _normalizer(reward_model: SegmentRewardModel) -> LocationNormalizer:
    if reward_model.normalizer is None:
        raise Skip(f"no {NORMALIZER_FILE}")
    return reward_model.normalizer


def normalizer(reward_model: SegmentRewardModel, config: DoctorConfig) -> Finding:
    """There is a normalizer, fitted for the rule that rewards are read under."""
    rule = reward_model.segmentation
    if reward_model.normalizer is None:
        if rule.rule == "response":
            raise Skip("one reward a response needs none")
        remedy = f"Run `segrew calibrate --reward_model {config.reward_model}`, or tell PPO --normalizer none."
        return Finding("warning", f"no {NORMALIZER_FILE}", None, remedy)
    reward_model.normalizer.require(reward_model.fingerprint, rule=rule.label, source=NORMALIZER_FILE)
    return Finding("ok", f"mode {reward_model.normalizer.mode}, for {rule.label}")


def normalizer_range(reward_model: SegmentRewardModel, scores: list[ScoredResponse], config: DoctorConfig) -> Finding:
    """The first unit of the longest answer lies where the normalizer was fitted."""
    fit = _normalizer(reward_model)
    if fit.mode != "location":
        raise Skip(f"mode {fit.mode} knows no location")
    segments = [segment for record in scores for segment in record.segments]
    length = sum(segment.tokens for segment in segments) / len(segments)
    units = max(1, round(config.max_new_tokens / length))
    first = 1 / units
    spread = fit.std(first)
    measured = f"{units} units in {config.max_new_tokens} tokens, so p from {first:.3g}, spread {spread:.3g}"
    if fit.fitted_range is None:
        return Finding("ok", f"{measured}; given parameters", first)
    measured += f"; fitted from {fit.fitted_range[0]:.3g}"
    if first >= fit.fitted_range[0]:
        return Finding("ok", measured, first)
    remedy = (
        "Run `segrew calibrate` on longer answers, or lower --max_new_tokens: the first rewards of long answers are "
        "normalized by a line drawn past its points."
    )
    return Finding("warning", measured, first, remedy)
