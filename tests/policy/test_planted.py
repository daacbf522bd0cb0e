"""Invariant 36: where two tokens of a short language decide, dense segment rewards teach in fewer updates."""

import torch

from policy.losses import policy_loss
from policy.reward_shaping import spread_rewards
from segrew.advantages import macro_advantages
from segrew.masking import masked_whiten
from segrew.segmentation import segment_by_ngram, segment_by_response

LENGTH, WORDS, ANSWERS, KEYS = 8, 6, 3, {2: 1, 6: 4}  # place -> the token that is worth a half there


def updates_to_reach(share: float, *, dense: bool, seed: int, most: int = 150) -> int:
    """Train a table of logits by PPO; each half of an answer is a segment that holds one key."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(LENGTH, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.15)
    mask = torch.ones(ANSWERS, LENGTH, dtype=torch.bool)
    halves, whole = segment_by_ngram(mask, LENGTH // 2), segment_by_response(mask)
    for done in range(most):
        drawn = torch.multinomial(logits.softmax(1), ANSWERS, True, generator=generator).T
        found = torch.stack([0.5 * (drawn[:, place] == token) for place, token in KEYS.items()], 1)
        if sum(0.5 * logits.softmax(1)[place, token] for place, token in KEYS.items()) >= share:
            return done
        rewards = (
            spread_rewards(found, halves) if dense else spread_rewards(found.sum(1, keepdim=True), whole, how="last")
        )
        values = torch.zeros_like(rewards)
        scales = {"gamma": 1.0, "lambda_": 0.0 if dense else 1.0}  # a segment is paid for itself, or all for the end
        advantages, _ = macro_advantages(rewards, values, halves, **scales)
        logprobs = logits.log_softmax(1)[torch.arange(LENGTH), drawn]
        loss, _ = policy_loss(logprobs, logprobs.detach(), masked_whiten(advantages, mask), halves)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return most


def test_dense_segment_rewards_reach_a_target_in_fewer_updates_than_a_terminal_one():
    dense, terminal = ([updates_to_reach(0.8, dense=kind, seed=seed) for seed in range(6)] for kind in (True, False))
    assert all(d < t for d, t in zip(dense, terminal, strict=True)), (dense, terminal)
    assert sum(dense) < 0.8 * sum(terminal)
