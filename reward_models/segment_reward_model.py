"""A reward model read at unit ends: an ordinary sequence-classification checkpoint plus `segrew.json`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from rich.progress import track
from torch import Tensor, nn

from reward_models.checkpoints import load_classifier, write_for_older_readers
from reward_models.normalizers import LocationNormalizer
from segrew.aggregation import Aggregator, aggregate
from segrew.chat import ChatFormat, Message
from segrew.language_models import (
    Conversations,
    best_device,
    load_causal_lm,
    load_tokenizer,
    micro_batches,
    model_fingerprint,
    plain_model,
    response_states,
    statistics_of_states,
    unused_pad_id,
)
from segrew.preferences import encode_answers
from segrew.run_directory import read_json, versions, write_json
from segrew.segmentation import ReadPosition, Segmentation, SegmentationConfig, read_columns, segment
from segrew.text_rules import warn_of_fallbacks

CARD_FILE = "segrew.json"
NORMALIZER_FILE = "normalizer.json"


@dataclass(frozen=True)
class RewardModelCard:
    """What a checkpoint's weights do not say: where rewards are read and how they become a score.

    Args:
        segmentation: the rule, with its threshold in nats.
        base_model: name or path of the frozen SFT model that cuts responses.
        segmenter_fingerprint, tokenizer_fingerprint: identities of that model and of the token ids.
        trunk_is_segmenter: the trunk was frozen, so one pass gives both cuts and rewards.
    """

    segmentation: SegmentationConfig
    base_model: str
    segmenter_fingerprint: str
    tokenizer_fingerprint: str
    chat_template: str | None = None
    read_position: ReadPosition = "end"
    aggregator: Aggregator = "mean"
    temperature: float = 1.0
    max_length: int = 1024
    trunk_is_segmenter: bool = False
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def fingerprint(self) -> str:
        """Identity of the rule that a normalizer is fitted for."""
        return self.segmentation.fingerprint(
            segmenter=self.segmenter_fingerprint,
            tokenizer=self.tokenizer_fingerprint,
            read_position=self.read_position,
        )

    def save(self, directory: Path) -> None:
        """Write `segrew.json`."""
        content = asdict(self) | {
            "segmentation": self.segmentation.to_dict(),
            "fingerprint": self.fingerprint,
        }
        write_json(directory / CARD_FILE, content)

    @classmethod
    def load(cls, directory: Path) -> "RewardModelCard":
        """Read `segrew.json`.

        Raises:
            ValueError: the directory is no reward model of segrew.
        """
        if not (directory / CARD_FILE).is_file():
            raise ValueError(
                f"{directory} is no reward-model directory: it has no {CARD_FILE}. Train one with `segrew train-rm`."
            )
        content = read_json(directory / CARD_FILE)
        content.pop("fingerprint", None)
        try:
            segmentation = SegmentationConfig.from_dict(content.pop("segmentation"))
            return cls(segmentation=segmentation, **content)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{directory / CARD_FILE}: not a card of this version of segrew ({error}).") from None


@dataclass(frozen=True)
class Segment:
    """One unit of a scored response.

    Args:
        start, end: character offsets in the response, [start, end); the texts of all units rebuild it.
        tokens: number of tokens, a final stop token included.
        reward: raw reading; normalized: by location, None without a normalizer; location: (k + 1) / count.
    """

    text: str
    start: int
    end: int
    tokens: int
    reward: float
    normalized: float | None
    location: float


@dataclass(frozen=True)
class ScoredResponse:
    """A response's score e(x, y) and the units it is made of."""

    score: float
    segments: list[Segment]


def read_rewards(
    head: nn.Module,
    states: Float[Tensor, "b t d"],
    columns: Int64[Tensor, "b s"],
    unit_mask: Bool[Tensor, "b s"],
) -> Float[Tensor, "b s"]:
    """r_k = w · h at unit k's read column, in float32; 0 in padding (2501.02790, section 3)."""
    index = columns[..., None].expand(-1, -1, states.shape[-1])
    with torch.autocast(states.device.type, enabled=False):
        rewards = head(states.gather(1, index).float()).squeeze(-1)
    return rewards.masked_fill(~unit_mask, 0.0)


class SegmentRewardModel:
    """A trained reward model with its tokenizer, card and normalizer.

    Args:
        model: a `...ForSequenceClassification` with one label and head `score`, or a peft model around it.
    """

    def __init__(
        self,
        model: nn.Module,
        chat: ChatFormat,
        card: RewardModelCard,
        normalizer: LocationNormalizer | None = None,
        segmenter: nn.Module | None = None,
    ):
        self.model, self.chat, self.card, self.normalizer = model, chat, card, normalizer
        self.head.float()
        self._segmenter = segmenter

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: torch.device | None = None) -> "SegmentRewardModel":
        """Load a reward-model directory.

        Raises:
            ValueError: it is none, its head is missing, or its tokenizer is not the one it was trained with.
        """
        directory = Path(directory)
        card = RewardModelCard.load(directory)
        chat = ChatFormat.from_tokenizer(load_tokenizer(str(directory)))
        if chat.fingerprint != card.tokenizer_fingerprint:
            raise ValueError(
                f"{directory}: its tokenizer or chat template is not the one it was trained with "
                f"({chat.fingerprint}, {CARD_FILE} says {card.tokenizer_fingerprint}); restore the files."
            )
        model = load_classifier(directory).to(device or best_device()).eval()
        path = directory / NORMALIZER_FILE
        normalizer = LocationNormalizer.load(path) if path.exists() else None
        return cls(model, chat, card, normalizer)

    def save_pretrained(self, directory: str | Path, *, merge: bool = True) -> None:
        """Write a directory that plain `AutoModelForSequenceClassification` loads.

        Args:
            merge: fold LoRA weights into the base, in memory too; otherwise write the adapter with its head.
        """
        directory = Path(directory)
        model: Any = self.model
        if hasattr(model, "peft_config") and merge:
            self.model = model = model.merge_and_unload()
        pad_id = unused_pad_id(self.chat.tokenizer, self.chat.stop_ids)
        model.config.pad_token_id = pad_id
        model.config.num_labels = 1
        model.save_pretrained(directory)
        self.chat.tokenizer.pad_token_id = pad_id
        self.chat.tokenizer.save_pretrained(directory)
        write_for_older_readers(directory)
        self.card.save(directory)
        if self.normalizer is not None:
            self.normalizer.save(directory / NORMALIZER_FILE)

    @property
    def head(self) -> nn.Module:
        """The linear layer `score`."""
        return plain_model(self.model).score

    @property
    def segmentation(self) -> SegmentationConfig:
        """The rule that cuts responses, its threshold in nats."""
        return self.card.segmentation

    @property
    def read_position(self) -> ReadPosition:
        """Where a unit is read: "end" or "content"."""
        return self.card.read_position

    @property
    def segmenter_fingerprint(self) -> str:
        """Identity of the frozen model whose entropies cut responses."""
        return self.card.segmenter_fingerprint

    @property
    def fingerprint(self) -> str:
        """Identity of the rule that a normalizer must be fitted for."""
        return self.card.fingerprint

    def segmenter(self) -> nn.Module:
        """Return the frozen SFT model that cuts responses, loading it the first time.

        Raises:
            ValueError: the model found under its name is another one.
        """
        if self._segmenter is None:
            device = next(self.model.parameters()).device
            model = load_causal_lm(self.card.base_model, device=device)
            if model_fingerprint(model) != self.card.segmenter_fingerprint:
                raise ValueError(
                    f"the segmenter '{self.card.base_model}' has other weights than when this reward model was "
                    f"trained ({model_fingerprint(model)}, {CARD_FILE} says {self.card.segmenter_fingerprint})."
                )
            self._segmenter = model
        return self._segmenter

    def aggregate(self, unit_rewards: Float[Tensor, "b s"], unit_mask: Bool[Tensor, "b s"]) -> Float[Tensor, " b"]:
        """Return e(x, y), the score of each response."""
        card = self.card
        return aggregate(unit_rewards, unit_mask, kind=card.aggregator, temperature=card.temperature)

    def unit_rewards(self, conversations: Conversations, segmentation: Segmentation) -> Float[Tensor, "b s"]:
        """Return the raw reward of each unit; 0 in padding."""
        states = response_states(self.model, conversations).at
        return self._read(states, conversations, segmentation)

    def _read(
        self, states: Float[Tensor, "b t d"], conversations: Conversations, segmentation: Segmentation
    ) -> Float[Tensor, "b s"]:
        columns = read_columns(segmentation, conversations.ended.to(states.device), self.read_position)
        return read_rewards(self.head, states, columns, segmentation.unit_mask)

    @torch.no_grad()
    def segment_and_read(
        self,
        conversations: Conversations,
        *,
        statistics: Callable[[Conversations], tuple[Tensor, ...]] | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Segmentation, Float[Tensor, "b s"]]:
        """Cut responses by this model's rule and read each unit; one pass where the trunk is the segmenter.

        Args:
            statistics: gives the segmenter's log-probabilities and entropies, for a caller that holds the segmenter.
            generator: for a rule that draws.
        """
        device = next(self.model.parameters()).device
        ended, mask = conversations.ended.to(device), conversations.mask.to(device)
        states = entropy = logprobs = None
        if self.segmentation.needs_model and statistics is not None:
            logprobs, entropy = statistics(conversations)
        elif self.segmentation.needs_model:
            segmenter = self.segmenter()
            cutting = response_states(segmenter, conversations)
            logprobs, entropy = statistics_of_states(segmenter, cutting.before, conversations)
            states = cutting.at if self.card.trunk_is_segmenter else None
        if states is None:
            states = response_states(self.model, conversations).at
        segmentation = segment(
            self.segmentation,
            mask,
            entropy=entropy,
            logprobs=logprobs,
            texts=self.chat.response_texts(conversations.responses),
            ended=ended,
            generator=generator,
        )
        return segmentation, self._read(states, conversations, segmentation)

    def encode(self, prompt: list[Message], response: str) -> tuple[list[int], list[int], bool]:
        """Return prompt ids, response ids and whether the response kept its stop token, within `max_length`."""
        prompt_ids, (kept,), (ended,) = encode_answers(prompt, [response], self.chat, self.card.max_length)
        return prompt_ids, kept, ended

    def score(
        self,
        prompts: list[list[Message]],
        responses: list[str],
        batch_size: int = 16,
        description: str = "",
    ) -> list[ScoredResponse]:
        """Score responses to prompts, in order.

        Args:
            description: label of the progress bar; empty for none.

        Raises:
            ValueError: the two lists differ in length, or the normalizer was fitted for another rule.
        """
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses; give one each.")
        if self.normalizer is not None:
            self.normalizer.require(self.fingerprint, rule=self.segmentation.label, source=NORMALIZER_FILE)
        rows = [self.encode(p, r) for p, r in zip(prompts, responses, strict=True)]
        ended = torch.tensor([row[2] for row in rows], dtype=torch.bool)
        conversations = Conversations([row[0] for row in rows], [row[1] for row in rows], ended)
        scored: dict[int, ScoredResponse] = {}
        cuts: list[Segmentation] = []
        batches = list(micro_batches(conversations, batch_size))
        for batch in track(batches, description, disable=not description):
            part = conversations.select(batch)
            segmentation, rewards = self.segment_and_read(part)
            cuts.append(segmentation)
            texts = [responses[i] for i in batch]
            scored.update(zip(batch, self.describe(segmentation, rewards, part, texts), strict=True))
        warn_of_fallbacks(cuts)
        return [scored[i] for i in range(len(rows))]

    def describe(
        self,
        segmentation: Segmentation,
        rewards: Float[Tensor, "b s"],
        conversations: Conversations,
        texts: list[str] | None = None,
    ) -> list[ScoredResponse]:
        """Turn a scored batch into records with text.

        Args:
            texts: the responses' own text; None takes the text of their ids.
        """
        scores = self.aggregate(rewards, segmentation.unit_mask).tolist()
        locations = segmentation.locations
        normalized = self.normalizer.normalize(rewards, segmentation).tolist() if self.normalizer else None
        columns = zip(
            segmentation.counts.tolist(),
            segmentation.ends.tolist(),
            segmentation.lengths.tolist(),
            strict=True,
        )
        records = []
        for b, (count, ends, lengths) in enumerate(columns):
            ids = conversations.responses[b]
            text = self.chat.decode(ids) if texts is None else texts[b]
            spans = self.chat.cut_text(ids, ends[:count], None if texts is None else text)
            segments = [
                Segment(
                    text=text[start:stop],
                    start=start,
                    end=stop,
                    tokens=lengths[k],
                    reward=float(rewards[b, k]),
                    normalized=normalized[b][k] if normalized else None,
                    location=float(locations[b, k]),
                )
                for k, (start, stop) in enumerate(spans)
            ]
            records.append(ScoredResponse(scores[b], segments))
        return records
