"""A reward model read at unit ends: an ordinary sequence-classification checkpoint plus `segrew.json`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from rich.progress import Progress
from torch import Tensor, nn

from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.checkpoints import (
    config_of,
    find_checkpoint,
    load_classifier,
    require_unit_attention,
    write_for_older_readers,
)
from reward_models.foreign_checkpoints import card_of, score_normalizer
from reward_models.normalizers import LocationNormalizer
from reward_models.reading import Readings, at_units, read_tokens
from reward_models.scored_responses import ScoredResponse, describe
from segrew.chat import ChatFormat, Message
from segrew.conversations import TOKENS_PER_BATCH, Conversations, micro_batches, response_states, statistics_of_states
from segrew.encoding import EncodedAnswer, encode_answer
from segrew.language_models import (
    best_device,
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    plain_model,
    unused_pad_id,
)
from segrew.segmentation import ReadPosition, Segmentation, SegmentationConfig, segment
from segrew.segmenter import CHUNK_ROWS, ResponseFeatures, response_features
from segrew.text_rules import warn_of_fallbacks

NORMALIZER_FILE = "normalizer.json"


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
        segmenter_dtype: torch.dtype | None = None,
    ):
        self.model, self.chat, self.card, self.normalizer = model, chat, card, normalizer
        self.head.float()
        if card.aggregator == "learned":
            require_unit_attention(model, card.base_model).float()
        self._segmenter, self._segmenter_dtype = segmenter, segmenter_dtype

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        device: torch.device | None = None,
        *,
        dtype: torch.dtype | None = None,
        segmentation: SegmentationConfig | None = None,
        base_model: str | None = None,
        chat_template: str | None = None,
    ) -> "SegmentRewardModel":
        """Load a reward-model directory, a reward model of the hub, or one that another program wrote.

        Args:
            dtype: of trunk and segmenter; None: as the trunk's files hold it, and `best_dtype`. Heads are float32.
            segmentation, base_model, chat_template: for a checkpoint without `segrew.json`: where its rewards are read
                (default once, at the stop token), the language model that cuts, and the template it was trained with.

        Raises:
            ValueError: it is none, its head is missing, or its tokenizer is not the one it was trained with.
        """
        path, device = find_checkpoint(directory), device or best_device()
        card = RewardModelCard.load(path) if (path / CARD_FILE).is_file() else None
        if card and any(value is not None for value in (segmentation, base_model, chat_template)):
            raise ValueError(f"{directory} has a {CARD_FILE}, which says how it is read; pass nothing beside it.")
        chat = ChatFormat.from_tokenizer(load_tokenizer(str(path)), chat_template)
        segmenter = load_causal_lm(base_model, dtype=dtype, device=device) if base_model else None
        normalizer = None
        if card is not None:
            if chat.fingerprint != card.tokenizer_fingerprint:
                raise ValueError(
                    f"{directory}: its tokenizer or chat template is not the one it was trained with "
                    f"({chat.fingerprint}, {CARD_FILE} says {card.tokenizer_fingerprint}); restore the files."
                )
        else:
            config = config_of(str(path))
            card = card_of(
                str(directory), config, chat, segmentation=segmentation, base_model=base_model, segmenter=segmenter
            )
            normalizer = score_normalizer(config, card)
        model = load_classifier(path, dtype=dtype or "auto").to(device).eval()
        if (path / NORMALIZER_FILE).exists():
            normalizer = LocationNormalizer.load(path / NORMALIZER_FILE)
        return cls(model, chat, card.within(model), normalizer, segmenter, dtype)

    def save_pretrained(self, directory: str | Path, *, merge: bool = True) -> None:
        """Write a directory that plain `AutoModelForSequenceClassification` loads.

        Args:
            merge: fold LoRA weights into the base, in memory too; else write the adapter with its head (num_labels=1).
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
            if not self.segmenter_fingerprint:
                raise ValueError(f"{self.card.base_model} names no model that cuts responses; pass base_model=… to it.")
            if Path(self.card.base_model).is_absolute() and not Path(self.card.base_model).is_dir():
                raise ValueError(
                    f"the model that cuts this reward model's responses is no longer in {self.card.base_model}; put it "
                    f"back there, or write where it is now as base_model into {CARD_FILE}."
                )
            device = next(self.model.parameters()).device
            model = load_causal_lm(self.card.base_model, dtype=self._segmenter_dtype, device=device)
            if model_fingerprint(model) != self.card.segmenter_fingerprint:
                raise ValueError(
                    f"the segmenter '{self.card.base_model}' has other weights than when this reward model was "
                    f"trained ({model_fingerprint(model)}, {CARD_FILE} says {self.card.segmenter_fingerprint})."
                )
            self._segmenter = model
        return self._segmenter

    def read(
        self, conversations: Conversations, segmentation: Segmentation, outputs: Float[Tensor, "b t k"] | None = None
    ) -> Readings:
        """Return the raw reward of each unit and the score of each response.

        Args:
            outputs: what the heads said after every token, if it is known; else the trunk runs.
        """
        if outputs is None:
            outputs = self.outputs(conversations)
        return at_units(outputs, conversations.ended, segmentation, self.card)

    def outputs_of(self, states: Float[Tensor, "n d"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t k"]:
        """What the heads say after every token, from the trunk's states there, row after row; 0 in padding."""
        return read_tokens(self.model, states, mask, self.card)

    def outputs(self, conversations: Conversations) -> Float[Tensor, "b t k"]:
        """What they say after every token, from a pass of its own."""
        states = response_states(self.model, conversations)
        return self.outputs_of(states.at, states.mask)

    def segmenter_pass(
        self, conversations: Conversations
    ) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"], Float[Tensor, "b t k"] | None]:
        """Return the segmenter's log-probabilities and entropies, and the heads' outputs where it is the trunk."""
        segmenter = self.segmenter()
        states = response_states(segmenter, conversations)
        logprobs, entropy = statistics_of_states(segmenter, states.before, conversations)
        return logprobs, entropy, self.outputs_of(states.at, states.mask) if self.card.trunk_is_segmenter else None

    def cut(
        self,
        conversations: Conversations,
        logprobs: Float[Tensor, "b t"] | None = None,
        entropy: Float[Tensor, "b t"] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Segmentation:
        """Cut responses by this model's rule.

        Args:
            logprobs, entropy: the segmenter's, for a rule that reads them.
            generator: for a rule that draws.
        """
        device = next(self.model.parameters()).device
        return segment(
            self.segmentation,
            conversations.mask.to(device),
            entropy=entropy,
            logprobs=logprobs,
            texts=self.chat.response_texts(conversations.responses),
            ended=conversations.ended.to(device),
            generator=generator,
        )

    @torch.no_grad()
    def segment_and_output(
        self,
        conversations: Conversations,
        *,
        known: tuple[Tensor, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Segmentation, Float[Tensor, "b t k"]]:
        """Cut responses by this model's rule, and return what the heads say after every token.

        One pass where the trunk is the segmenter, or where the rule asks no model.

        Args:
            known: log-probabilities and entropies of the segmenter's pass, and its states where it is the trunk, if
                they are known; see `ResponseFeatures.of_rows`.
            generator: for a rule that draws.
        """
        logprobs = entropy = outputs = None
        if known is not None:
            device = next(self.model.parameters()).device
            logprobs, entropy, *states = (feature.to(device) for feature in known)
            outputs = self.outputs_of(states[0], conversations.mask.to(device)) if states else None
        elif self.segmentation.needs_model:
            logprobs, entropy, outputs = self.segmenter_pass(conversations)
        if outputs is None:
            outputs = self.outputs(conversations)
        return self.cut(conversations, logprobs, entropy, generator=generator), outputs

    def segment_and_read(
        self,
        conversations: Conversations,
        *,
        known: tuple[Tensor, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Segmentation, Readings]:
        """Cut responses by this model's rule and read each unit; see `segment_and_output`."""
        segmentation, outputs = self.segment_and_output(conversations, known=known, generator=generator)
        return segmentation, self.read(conversations, segmentation, outputs)

    def encode(
        self,
        prompt: list[Message] | str,
        response: str,
        finished: bool = True,
        template: dict[str, Any] | None = None,
    ) -> EncodedAnswer:
        """Encode a response to a prompt within `max_length`.

        Args:
            finished: False for a response that was cut off, and so has no stop token.
            template: further arguments of the chat template, such as tools.
        """
        limits = self.card.max_length, self.card.overlong
        encoded = encode_answer(prompt, response, self.chat, *limits, template, finished=finished)
        assert encoded is not None, "a card never drops"
        return encoded

    def score(
        self,
        prompts: Sequence[list[Message] | str],
        responses: list[str],
        batch_size: int | None = None,
        description: str = "",
        *,
        finished: list[bool] | None = None,
        templates: list[dict[str, Any]] | None = None,
        max_tokens: int = TOKENS_PER_BATCH,
    ) -> list[ScoredResponse]:
        """Score responses to prompts, in order.

        Args:
            prompts: messages each, or their text as the chat template renders it.
            batch_size: responses of one forward pass at most; None for no limit but that of its tokens.
            finished: False for a response that was cut off; None for all finished.
            templates: further arguments of the chat template for each prompt, such as tools.
            description: label of the progress bar; empty for none.
            max_tokens: of one forward pass, each prompt counted once.

        Raises:
            ValueError: the two lists differ in length, the normalizer was fitted for another rule, or a score is no
                number.
        """
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses; give one each.")
        if self.normalizer is not None:
            self.normalizer.require(self.fingerprint, rule=self.segmentation.label, source=NORMALIZER_FILE)
        options = zip(finished or [True] * len(prompts), templates or [{}] * len(prompts), strict=True)
        rows = [self.encode(p, r, *option) for p, r, option in zip(prompts, responses, options, strict=True)]
        ended = torch.tensor([row.ended for row in rows], dtype=torch.bool)
        conversations = Conversations([row.prompt for row in rows], [row.response for row in rows], ended)
        scored = self.score_rows(
            conversations, list(responses), max_tokens=max_tokens, max_rows=batch_size, description=description
        )
        return [replace(record, cut=row.cut) for record, row in zip(scored, rows, strict=True)]

    @torch.no_grad()
    def score_rows(
        self,
        conversations: Conversations,
        texts: Sequence[str | None] | None = None,
        *,
        max_tokens: int = TOKENS_PER_BATCH,
        max_rows: int | None = None,
        description: str = "",
        cached: bool = True,
        generator: torch.Generator | None = None,
    ) -> list[ScoredResponse]:
        """Score encoded responses, in order.

        Args:
            texts, description, max_tokens: as in `describe` and `score`.
            max_rows: responses of one forward pass at most.
            cached: what the frozen segmenter says comes from the cache, or goes to it; not for answers drawn just now.
            generator: for a rule that draws.
        """
        scored: dict[int, ScoredResponse] = {}
        cuts: list[Segmentation] = []
        with Progress(disable=not description) as progress:
            bar = progress.add_task(description, total=len(conversations))
            size = CHUNK_ROWS if cached else max(len(conversations), 1)
            for first in range(0, len(conversations), size):
                chunk = conversations.select(list(range(first, min(first + size, len(conversations)))))
                features = self._features(chunk, max_tokens) if cached else None
                for rows in micro_batches(chunk, max_tokens, max_rows=max_rows):
                    part, places = chunk.select(rows), [first + row for row in rows]
                    known = None if features is None else features.of_rows(rows, chunk.lengths)
                    segmentation, readings = self.segment_and_read(part, known=known, generator=generator)
                    cuts.append(segmentation)
                    own = texts and [texts[place] for place in places]
                    described = self.describe(segmentation, readings, part, own)
                    scored.update(zip(places, described, strict=True))
                    progress.advance(bar, len(rows))
        warn_of_fallbacks(cuts)
        return [scored[place] for place in range(len(conversations))]

    def _features(self, conversations: Conversations, max_tokens: int) -> ResponseFeatures | None:
        """What the frozen segmenter says, where the rule needs it; states, which are large, are read but not added."""
        if not self.segmentation.needs_model:
            return None
        with_states = self.card.trunk_is_segmenter
        return response_features(
            self.segmenter(),
            conversations,
            max_tokens=max_tokens,
            with_states=with_states,
            store=not with_states,
            fingerprint=self.segmenter_fingerprint,
        )

    def describe(
        self,
        segmentation: Segmentation,
        readings: Readings,
        conversations: Conversations,
        texts: Sequence[str | None] | None = None,
    ) -> list[ScoredResponse]:
        """Turn a scored batch into records with text.

        Args:
            texts: the responses' own text; None, of all or of one, takes the text of its ids.

        Raises:
            ValueError: a score is no number, so that none is written down as a result; the message has its text.
        """
        return describe(self.chat, self.normalizer, segmentation, readings, conversations, texts)
