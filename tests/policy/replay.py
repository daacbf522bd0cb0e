"""Runs of `segrew ppo`, one after the other: `replay.py ANSWERS.json YAML …`; answers that are there are not drawn."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import PartialState

import policy.ppo as ppo
from policy.rollout import Answers
from segrew.conversations import Conversations


@contextmanager
def replayed(known: dict[str, list]) -> Iterator[None]:
    """Let each step take its answers from `known`, by step and prompt, and note there what was drawn for want of it."""
    sample, collect, step = ppo.sample_answers, ppo.collect, 0

    def noting_the_step(run, number, *rest):
        nonlocal step
        step = number
        return collect(run, number, *rest)

    def sample_answers(model, chat, prompts, *rest, **options):
        names = [f"{step} {prompt}" for prompt in prompts]
        if names[0] not in known:
            drawn, found = sample(model, chat, prompts, *rest, **options), defaultdict(list)
            columns = drawn.conversations.responses, drawn.texts, drawn.conversations.ended.tolist()
            for name, *row in zip(names, *columns, strict=True):
                found[name].append(row)
            known.update(found)
        rows = [known[name][names[:i].count(name)] for i, name in enumerate(names)]
        responses, texts, ended = (list(column) for column in zip(*rows, strict=True))
        return Answers(Conversations(prompts, responses, torch.tensor(ended)), texts, [None] * len(prompts))

    with patch.object(ppo, "collect", noting_the_step), patch.object(ppo, "sample_answers", sample_answers):
        yield


if __name__ == "__main__":
    PartialState.destroy_process_group = lambda *_: None  # there is another run to come
    recorded = json.loads(Path(sys.argv[1]).read_text())
    for config in sys.argv[2:]:
        with replayed(recorded.get(Path(config).stem, {})):
            ppo.main(["--config", config])
