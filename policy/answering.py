"""Drawing N answers to every turn of every question, and scoring them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from policy.answer_files import Question
from policy.best_of import Candidates
from policy.rollout import Answers, sample_answers
from policy.room import check_room
from policy.sampling import GenerationEngine, Sampling
from reward_models import SegmentRewardModel
from reward_models.scored_responses import ScoredResponse
from segrew import processes
from segrew.chat import ChatFormat, Message


@dataclass(frozen=True)
class Answerer:
    """A policy that answers through an engine, and the reward model that scores it if there is one."""

    model: nn.Module
    chat: ChatFormat
    reward_model: SegmentRewardModel | None
    sampling: Sampling
    engine: GenerationEngine | None = None

    @property
    def scored_on(self) -> str | None:
        """tokens: the very ones that were drawn; text: as another tokenizer reads it, always with a stop token."""
        if self.reward_model is None:
            return None
        return "tokens" if self.chat.fingerprint == self.reward_model.chat.fingerprint else "text"

    def check_room(self, questions: list[Question]) -> None:
        """Refuse questions that the model's context cannot hold with all their answers at full length.

        Raises:
            ValueError: naming the longest question.
        """
        new = self.sampling.max_new_tokens
        needed = [
            (q.where or q.id, len(self.chat.prompt_ids(q.prompt([""] * q.turns))) + q.turns * new) for q in questions
        ]
        check_room(
            self.model, needed, name="the model", remedy=f"lower --max_new_tokens {new}, or leave the question out."
        )

    def answer(
        self, questions: list[Question], temperature_of: Callable[[Question], float], n: int, seed: int
    ) -> list[list[Candidates]]:
        """Draw `n` answers to each turn of each question; the best one is what the next turn goes on from.

        Returns:
            For each question the candidates of its turns.
        """
        generator = torch.Generator().manual_seed(seed)
        answered: list[list[Candidates]] = [[] for _ in questions]
        for turn in range(max(question.turns for question in questions)):
            groups: dict[float, list[int]] = defaultdict(list)
            for i, question in enumerate(questions):
                if turn < question.turns:
                    groups[temperature_of(question)].append(i)
            for temperature, rows in sorted(groups.items()):
                names = [questions[i].name(turn) for i in rows]
                prompts = [questions[i].prompt([one.texts[one.best] for one in answered[i]]) for i in rows]
                drawn = self._draw(names, prompts, self.sampling.at(temperature), n, generator)
                for i, candidates in zip(rows, drawn, strict=True):
                    answered[i].append(candidates)
        return answered

    def _draw(
        self, names: list[str], prompts: list[list[Message]], sampling: Sampling, n: int, generator: torch.Generator
    ) -> list[Candidates]:
        temperature = 0.0 if sampling.greedy else sampling.temperature
        repeated = [prompt for prompt in prompts for _ in range(n)]
        ids = [self.chat.prompt_ids(prompt) for prompt in prompts]
        label = processes.label(f"Answering at temperature {temperature:g}")
        answers = sample_answers(
            self.model, self.chat, [row for row in ids for _ in range(n)], sampling, generator, label, self.engine
        )
        scored, ended = self._score(repeated, answers, generator), answers.conversations.ended.tolist()
        candidates = []
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            own = slice(i * n, (i + 1) * n)
            candidates.append(Candidates(name, prompt, temperature, answers.texts[own], ended[own], scored[own]))
        return candidates

    def _score(
        self, prompts: list[list[Message]], answers: Answers, generator: torch.Generator
    ) -> list[ScoredResponse]:
        model = self.reward_model
        if model is None:
            return []
        if self.scored_on == "text":
            return model.score(prompts, answers.texts, description=processes.label("Scoring"))
        label = processes.label("Scoring")
        return model.score_rows(answers.conversations, description=label, cached=False, generator=generator)
