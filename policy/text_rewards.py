"""A reward model with its own tokenizer: it reads the answer's text, and its segments are mapped back to tokens."""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from policy.readings import Answered, Reading, Units
from reward_models import LocationNormalizer, SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches
from segrew.language_models import context_length
from segrew.segmentation import Segmentation


@dataclass(frozen=True)
class TextModelReward:
    """A reward model that reads text: own template, own tokens, own segmenter, own rule.

    Args:
        chat: the policy's, whose tokens the rewards are mapped to.
        terminal: one reward, the model's score, at the end; else one for each of its own segments.
        max_tokens: of one pass, each prompt counted once.
    """

    name: str
    model: SegmentRewardModel
    chat: ChatFormat
    terminal: bool
    normalizer: LocationNormalizer | None
    max_tokens: int

    @torch.no_grad()
    def read(self, answered: Answered, units: Units) -> Reading:
        """Score the text as `segrew score` does; an answer that was cut off gets no stop token.

        One that the model's context does not hold, in its own tokens, gets no reward (NaN) and a warning.
        """
        theirs = self._encode(answered)
        fitting = self._fitting(theirs)
        device = units.actions.ids.device
        scores = torch.zeros(len(theirs), device=device)
        ids = torch.full(units.actions.ids.shape, -1)
        raws: list[Tensor] = [torch.zeros(1)] * len(theirs)
        rewards: list[Tensor] = list(raws)
        for row in set(range(len(theirs))) - set(fitting):
            scores[row], raws[row], rewards[row] = (torch.full(shape, torch.nan) for shape in ((), (1,), (1,)))
            ids[row, : len(answered.conversations.responses[row])] = 0
        for places in micro_batches(theirs.select(fitting), self.max_tokens):
            rows = [fitting[place] for place in places]
            part = theirs.select(rows)
            cut, found = self.model.segment_and_read(part)
            scores[rows], raw = found.scores.to(device), found.rewards
            if self.terminal:
                continue
            normalized = raw if self.normalizer is None else self.normalizer.normalize(raw, cut)
            for k, row in enumerate(rows):
                ends = cut.ends[k, : int(cut.counts[k])].tolist()
                unit_of_token, place = self._map(answered, row, part.responses[k], ends)
                ids[row, : len(unit_of_token)] = unit_of_token
                raws[row], rewards[row] = (_merged(x[k, : len(ends)], place) for x in (raw, normalized))
        if self.terminal:
            return Reading(self.name, units.whole, scores[:, None], scores[:, None], scores, "last")
        pad = torch.nn.utils.rnn.pad_sequence
        raw, normalized = (pad(x, batch_first=True).to(device) for x in (raws, rewards))
        return Reading(self.name, Segmentation(ids.to(device)), raw, normalized, scores)

    def _encode(self, answered: Answered) -> Conversations:
        chat, ended = self.model.chat, answered.conversations.ended
        responses = []
        for text, stopped in zip(answered.texts, ended.tolist(), strict=True):
            ids = chat.response_ids(text)
            responses.append(ids if stopped or len(ids) == 1 else ids[:-1])
        holds_stop = [ids[-1] == chat.stop_id for ids in responses]
        prompts = [chat.prompt_ids(prompt.messages, prompt.template) for prompt in answered.prompts]
        return Conversations(prompts, responses, torch.tensor(holds_stop, dtype=torch.bool))

    def _fitting(self, theirs: Conversations) -> list[int]:
        """Rows that the model has positions for."""
        limit, lengths = context_length(self.model.model), theirs.lengths
        needed = [len(prompt) + length for prompt, length in zip(theirs.prompts, lengths, strict=True)]
        fitting = [row for row, tokens in enumerate(needed) if limit is None or tokens <= limit]
        if len(fitting) < len(needed):
            warnings.warn(
                f"{len(needed) - len(fitting)} of {len(needed)} answers, with their prompts, are longer than the "
                f"context of {self.name} (up to {max(needed)} of its tokens, it has {limit}) and get no reward; lower "
                "--max_new_tokens or --max_prompt_length.",
                stacklevel=2,
            )
        return fitting

    def _map(
        self, answered: Answered, row: int, their_ids: list[int], ends: list[int]
    ) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " s"]]:
        """Unit of each of the policy's tokens, and to which of those units each of the model's segments went.

        A token belongs to the segment that its last character is in. A segment that no token ends in lends its
        reward to the next one that has a token, or to the last.
        """
        text, ids = answered.texts[row], answered.conversations.responses[row]
        stops = torch.tensor([stop for _, stop in self.model.chat.cut_text(their_ids, ends, text)])
        tokens = torch.tensor([stop for _, stop in self.chat.cut_text(ids, list(range(len(ids))))])
        segment = torch.searchsorted(stops, tokens).clamp(max=len(ends) - 1)
        present, unit_of_token = segment.unique(return_inverse=True)
        place = torch.searchsorted(present, torch.arange(len(ends))).clamp(max=len(present) - 1)
        return unit_of_token, place


def _merged(rewards: Float[Tensor, " s"], place: Int64[Tensor, " s"]) -> Float[Tensor, " u"]:
    """Sum the rewards of the segments that share a unit."""
    place = place.to(rewards.device)
    return rewards.new_zeros(int(place.max()) + 1).index_add(0, place, rewards)
