"""Every row once an epoch, every prompt once a pass, and the same order after a resume."""

from itertools import chain

import torch

from policy.minibatches import micro_batches_of, mini_batches, prompt_positions, step_generator
from segrew.conversations import Conversations


def test_each_epoch_visits_every_row_once_in_a_new_order():
    batches = list(mini_batches(10, num_epochs=3, num_mini_batches=4, generator=step_generator(0, 1, 0)))
    assert [len(rows) for rows in batches] == [3, 3, 2, 2] * 3
    epochs = [list(chain(*batches[i : i + 4])) for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = list(mini_batches(10, num_epochs=3, num_mini_batches=4, generator=step_generator(0, 1, 0)))
    assert batches == again


def test_more_mini_batches_than_rows():
    assert sorted(mini_batches(2, num_epochs=1, num_mini_batches=5, generator=step_generator(0, 1, 0))) == [[0], [1]]


def test_answers_to_one_prompt_stay_in_one_mini_batch():
    options = {"num_epochs": 2, "group": 3}
    batches = list(mini_batches(12, num_mini_batches=2, generator=step_generator(0, 1, 0), **options))
    assert [len(rows) for rows in batches] == [6] * 4
    for epoch in (batches[:2], batches[2:]):
        assert sorted(chain(*epoch)) == list(range(12))
        assert all(len({row // 3 for row in rows}) == 2 for rows in epoch)
    alone = list(mini_batches(12, num_mini_batches=6, generator=step_generator(0, 1, 0), **options))
    assert [len(rows) for rows in alone] == [2] * 12  # more parts than prompts


def test_micro_batches_hold_the_rows_of_their_mini_batch():
    lengths = [3, 9, 1, 8, 2, 7]
    conversations = Conversations(
        [[1, k] for k in range(6)], [[5] * n for n in lengths], torch.ones(6, dtype=torch.bool)
    )
    parts = list(micro_batches_of([5, 0, 3, 2], conversations, 2))
    assert sorted(chain(*parts)) == [0, 2, 3, 5]
    assert all(len(part) <= 2 for part in parts)
    assert [sorted(lengths[i] for i in part) for part in parts] == [[7, 8], [1, 3]]


def test_micro_batches_keep_to_a_budget_in_tokens():
    conversations = Conversations([[1, 2]] * 3 + [[3]], [[5] * 4] * 4, torch.ones(4, dtype=torch.bool))
    parts = list(micro_batches_of([0, 1, 2, 3], conversations, 8, 10))
    assert sorted(map(sorted, parts)) == [[0, 1], [2], [3]]  # two answers with their prompt once are 10 tokens


def test_prompts_of_consecutive_steps_tile_shuffled_epochs():
    steps = [prompt_positions(5, step, 4, seed=3) for step in range(1, 11)]
    drawn = list(chain(*steps))
    epochs = [drawn[i : i + 5] for i in range(0, 40, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert prompt_positions(5, 7, 4, seed=3) == steps[6]


def test_generators_differ_by_seed_step_and_process():
    keys = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1), (11, 1, 0), (1, 11, 0)]
    draws = {float(torch.rand((), generator=step_generator(*key))) for key in keys}
    assert len(draws) == len(keys)
