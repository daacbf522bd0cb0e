"""Where the reward lands: segment rewards against marked error spans, beside zero-cost token credits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from reward_models.benchmark_credit import Row
from reward_models.benchmark_items import Item, encode_items
from reward_models.localisation_metrics import (
    chance_of_split,
    inside_words,
    low_reward_auc,
    lowest_unit_hit,
    mean_of_known,
    paired_difference,
    pooled_aucs,
    unit_rewards,
    words_of_tokens,
)
from reward_models.scored_responses import ScoredResponse
from reward_models.segment_reward_model import SegmentRewardModel
from reward_models.token_credit import final_attention, prefix_values
from segrew.conversations import TOKENS_PER_BATCH

OURS = "segments"
METHODS = {OURS: "mean", "prefix_difference": "sum", "attention": "sum", "surprisal": "mean"}  # token -> unit
_FIGURES = ("auc", "lowest_unit", "words_split", "word_difference")


def bandit_for(reward_model: SegmentRewardModel, directory: str | None) -> SegmentRewardModel:
    """Return the response reward model whose score the baselines take apart; the model itself where none is named.

    Raises:
        ValueError: it reads units other than the response, or other tokens.
    """
    if directory is None:
        return reward_model
    bandit = SegmentRewardModel.from_pretrained(directory)
    if bandit.segmentation.rule != "response":
        raise ValueError(
            f"--bandit_model {directory}: its rule is {bandit.segmentation.label}; name a model trained with "
            "--rule response, whose score at the end of the answer the baselines take apart."
        )
    if bandit.chat.fingerprint != reward_model.chat.fingerprint:
        raise ValueError(
            f"--bandit_model {directory}: it reads other tokens or another template than the reward model."
        )
    return bandit


@torch.no_grad()
def localise_items(
    reward_model: SegmentRewardModel,
    bandit: SegmentRewardModel,
    items: Sequence[Item],
    *,
    max_tokens: int = TOKENS_PER_BATCH,
) -> list[dict[str, Any]]:
    """Give each content token a reward by each method: the lines of `scores.jsonl`, with their segments."""
    encoded, rows = encode_items(reward_model, items), {}
    for numbers, part, texts in encoded.batches(max_tokens):
        logprobs, entropy, outputs = reward_model.segmenter_pass(part)
        segmentation = reward_model.cut(part, logprobs, entropy)
        readings = reward_model.read(part, segmentation, outputs)
        described = reward_model.describe(segmentation, readings, part, texts)
        after, before = prefix_values(bandit.model, bandit.head, part)
        for k, number in enumerate(numbers):
            ids, units = part.responses[k], segmentation.ids[k]
            attention = final_attention(bandit.model, part.prompts[k], ids)
            credits = {
                OURS: _reward_of_each(described[k], units),
                "prefix_difference": (after - before)[k, : len(ids)],
                "attention": after[k, len(ids) - 1] * attention,
                "surprisal": logprobs[k, : len(ids)],
            }
            # One place more than tokens: it takes what a truncated answer leaves over.
            spans = reward_model.chat.cut_text(ids, list(range(len(ids) + 1)), texts[k])[:-1]
            rows[number] = _row(described[k], spans, units[: len(ids)].tolist(), credits)
    return [
        _about(item, encoded.cut[i]) | rows[held[0]]
        for i, (item, held) in enumerate(zip(items, encoded.rows, strict=True))
    ]


def _reward_of_each(described: ScoredResponse, units: torch.Tensor) -> torch.Tensor:
    values = [s.reward if s.normalized is None else s.normalized for s in described.segments]
    return torch.tensor([*values, 0.0])[units.cpu()]  # -1, a token in no unit, takes the last


def _row(
    described: ScoredResponse, spans: list[tuple[int, int]], units: list[int], credits: dict[str, torch.Tensor]
) -> dict[str, Any]:
    content = [j for j, (start, stop) in enumerate(spans) if stop > start]  # a stop token has no text
    return {
        "score": described.score,
        "segments": [asdict(segment) for segment in described.segments],
        "token_ends": [spans[j][1] for j in content],
        "token_units": [units[j] for j in content],
        "token_rewards": {name: values.float().cpu()[content].tolist() for name, values in credits.items()},
    }


def _about(item: Item, cut: list[str]) -> dict[str, Any]:
    about = {"id": item.id, "subset": item.subset, "digest": item.digest, "cut": cut}
    return about | {"prompt": item.prompt, "response": item.answers[0], "faults": [asdict(span) for span in item.spans]}


def localisation_scores(rows: Iterable[Row]) -> dict[str, Any]:
    """Summarize rows of `localise_items`.

    Returns:
        subsets: all, and each kind of span: accuracy is the mean over responses of the AUC of low reward for being in a
        span, n responses, ties those whose rewards are all equal. overall: that AUC. methods: for each, auc,
        auc_pooled, lowest_unit, words_split, word_difference, with intervals over responses; baselines with
        ours_minus_this. chance: of lowest_unit and words_split.
    """
    kept = [row for row in rows if row["token_ends"]]
    figures = [_figures(row) for row in kept]
    wrong = [in_spans(row) for row in kept]
    rewards = {name: [np.array(row["token_rewards"][name]) for row in kept] for name in METHODS}
    pooled = pooled_aucs(rewards, wrong)
    columns = {name: {key: [f[name][key] for f in figures] for key in _FIGURES} for name in METHODS}
    methods = {
        name: {key: mean_of_known(held[key]) | _beside(columns[OURS][key], held[key], name) for key in _FIGURES}
        | {"auc_pooled": pooled[name]}
        for name, held in columns.items()
    }
    subsets = {"all": _subset(kept, None)} | {kind: _subset(kept, kind) for kind in _kinds(kept)}
    return {
        "subsets": {name: entry for name, entry in subsets.items() if entry["n"]},
        "sections": {},
        "overall": methods[OURS]["auc"]["value"],
        "ties": subsets["all"]["ties"],
        "missing": [],
        "methods": methods,
        "chance": {key: mean_of_known([f["chance"][key] for f in figures]) for key in ("lowest_unit", "words_split")},
    }


def _beside(ours: list, theirs: list, name: str) -> dict[str, Any]:
    return {} if name == OURS else {"ours_minus_this": paired_difference(ours, theirs)}


def _figures(row: Row) -> dict[str, dict[str, float | None]]:
    units, wrong = np.array(row["token_units"]), in_spans(row)
    units = np.unique(units, return_inverse=True)[1]  # a unit without content, the stop token's own, is none here
    overlaps = np.bincount(units, wrong) > 0
    words = words_of_tokens(_token_spans(row), row["response"])
    found: dict[str, dict[str, float | None]] = {}
    chance: float | None = None
    for name, how in METHODS.items():
        rewards = np.array(row["token_rewards"][name])
        hit: float | None = None
        if wrong.any():
            hit, chance = lowest_unit_hit(unit_rewards(rewards, units, how), overlaps)
        split, difference = inside_words(rewards, words)
        found[name] = {"auc": low_reward_auc(rewards, wrong), "lowest_unit": hit}
        found[name] |= {"words_split": split, "word_difference": difference}
    found["chance"] = {"lowest_unit": chance, "words_split": chance_of_split(words, units)}
    return found


def _token_spans(row: Row) -> list[tuple[int, int]]:
    ends = row["token_ends"]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def in_spans(row: Row, keep: Callable[[Any], bool] = lambda _: True) -> np.ndarray:
    """Which tokens share a visible character with a marked span."""
    marked = np.zeros(len(row["response"]), dtype=bool)
    for fault in filter(keep, row["faults"]):
        marked[fault["start"] : fault["end"]] = True
    marked &= np.array([not character.isspace() for character in row["response"]], dtype=bool)
    return np.array([marked[start:stop].any() for start, stop in _token_spans(row)], dtype=bool)


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(fault["kind"] for row in rows for fault in row["faults"]))


def _subset(rows: Sequence[Row], kind: str | None) -> dict[str, Any]:
    """AUC of one kind of span against tokens in no span at all."""
    aucs, ties = [], 0
    for row in rows:
        wrong = in_spans(row, lambda fault: kind is None or fault["kind"] == kind)
        held = wrong | ~in_spans(row)
        rewards = np.array(row["token_rewards"][OURS])[held]
        auc = low_reward_auc(rewards, wrong[held])
        if auc is not None:
            aucs.append(auc)
            ties += bool(np.ptp(rewards) == 0)
    summary = mean_of_known(aucs)
    return {"accuracy": summary["value"], "n": summary["n"], "ties": ties, "ci95": summary["ci95"]}


def localisation_credits(rows: Iterable[Row]) -> dict[tuple[str, str, str], float]:
    """Return each response's AUC, to compare two models on."""
    credits = {}
    for row in rows:
        auc = low_reward_auc(np.array(row["token_rewards"][OURS]), in_spans(row))
        if auc is not None:
            credits[("responses", str(row["id"]), str(row["digest"]))] = auc
    return credits
