"""The order of things: which prompts a step answers, and how its rollouts are walked through in training."""

import random
from collections.abc import Iterator

import torch

from segrew.conversations import Conversations, micro_batches

FOR_ALL = -3  # instead of a process: what all of them draw alike in a step


def step_generator(seed: int, step: int, process: int) -> torch.Generator:
    """All randomness of one step on one process."""
    return torch.Generator().manual_seed(random.Random(f"{seed}/{step}/{process}").getrandbits(62))


def prompt_positions(count: int, step: int, batch_size: int, seed: int) -> list[int]:
    """The prompts of a step: each epoch of the data is shuffled anew, and batches run across its border."""
    positions, orders = [], {}
    for place in range((step - 1) * batch_size, step * batch_size):
        epoch, offset = divmod(place, count)
        if epoch not in orders:
            generator = step_generator(seed, epoch, -1)
            orders[epoch] = torch.randperm(count, generator=generator).tolist()
        positions.append(orders[epoch][offset])
    return positions


def mini_batches(
    count: int, *, num_epochs: int, num_mini_batches: int, generator: torch.Generator, group: int = 1
) -> Iterator[list[int]]:
    """Yield the rows of each optimizer step: every epoch a fresh shuffle, cut into equal parts.

    Where `count` does not divide, the first parts hold one row (or group) more.

    Args:
        group: so many rows in sequence answer one prompt; they stay together, and their passes share its prefix,
            unless there are more parts than prompts.
    """
    size = group if num_mini_batches * group <= count else 1
    for _ in range(num_epochs):
        order = torch.randperm(count // size, generator=generator)
        for part in order.tensor_split(min(num_mini_batches, count)):
            yield [size * place + k for place in part.tolist() for k in range(size)]


def micro_batches_of(
    rows: list[int],
    conversations: Conversations,
    batch_size: int,
    max_tokens: int | None = None,
    *,
    padded: bool = False,
) -> Iterator[list[int]]:
    """Cut the rows of a mini-batch into micro-batches of rows of similar length.

    Args:
        batch_size: most rows of one. max_tokens: most tokens of one, each prompt counted once unless padded.
    """
    for part in micro_batches(conversations.select(rows), max_tokens, max_rows=batch_size, padded=padded):
        yield [rows[i] for i in part]
