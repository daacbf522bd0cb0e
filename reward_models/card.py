"""`segrew.json`: what a checkpoint's weights do not say about how it is to be read."""

import os
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import nn

from segrew.aggregation import Aggregator
from segrew.embedded_model import lasting_name
from segrew.encoding import Overlong
from segrew.language_models import context_length
from segrew.run_directory import CARD_FILE, read_json, versions, write_json
from segrew.segmentation import ReadPosition, SegmentationConfig

_FROM_HERE = "base_model_from_here"  # finds a model that was moved together with its reward model
_NOT_FIELDS = ("fingerprint", "chat_template")  # derived; written by the first version, and read by nothing


@dataclass(frozen=True)
class RewardModelCard:
    """Where rewards are read and how they become a score.

    Args:
        segmentation: the rule, with its threshold in nats.
        base_model: name or path of the frozen SFT model that cuts responses.
        segmenter_fingerprint: identity of that model; empty where no model is known to have cut responses.
        tokenizer_fingerprint: identity of the token ids.
        overlong: what is cut first where prompt and response have more than `max_length` tokens.
        trunk_is_segmenter: the trunk was frozen, so one pass gives both cuts and rewards.
    """

    segmentation: SegmentationConfig
    base_model: str
    segmenter_fingerprint: str
    tokenizer_fingerprint: str
    read_position: ReadPosition = "end"
    aggregator: Aggregator = "mean"
    temperature: float = 1.0
    max_length: int = 1024
    overlong: Overlong = "truncate_prompt_left"
    trunk_is_segmenter: bool = False
    versions: dict[str, str] = field(default_factory=versions)

    def __post_init__(self) -> None:
        if self.read_position not in ("end", "content"):
            raise ValueError(f"unknown read_position {self.read_position!r}: choose end or content")
        if self.segmentation.compat and self.read_position != "end":
            raise ValueError(
                f"read_position {self.read_position} with compat {self.segmentation.compat}: there the stop token is "
                "in no unit, so each unit is read at its own last token; leave read_position at end."
            )

    @property
    def fingerprint(self) -> str:
        """Identity of the rule that a normalizer is fitted for."""
        return self.segmentation.fingerprint(
            segmenter=self.segmenter_fingerprint,
            tokenizer=self.tokenizer_fingerprint,
            read_position=self.read_position,
        )

    def within(self, model: nn.Module) -> "RewardModelCard":
        """Return the card for a model that may have fewer positions than `max_length`: rows are cut to those."""
        limit = context_length(model)
        if limit is None or self.max_length <= limit:
            return self
        warnings.warn(
            f"{CARD_FILE} says max_length {self.max_length}, and the reward model's context has {limit} tokens, past "
            f"which its numbers mean nothing: longer rows are cut to {limit}; write that into {CARD_FILE}.",
            stacklevel=3,
        )
        return replace(self, max_length=limit)

    def save(self, directory: Path) -> None:
        """Write `segrew.json`."""
        base_model = lasting_name(self.base_model)
        content = asdict(self) | {
            "segmentation": self.segmentation.to_dict(),
            "base_model": base_model,
            "fingerprint": self.fingerprint,
        }
        if Path(base_model).is_dir():
            content[_FROM_HERE] = os.path.relpath(base_model, directory)
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
        from_here = content.pop(_FROM_HERE, None)
        try:
            named = Path(content["base_model"])
            if from_here and named.is_absolute() and not named.is_dir() and (directory / from_here).is_dir():
                content["base_model"] = lasting_name(str(directory / from_here))
            segmentation = SegmentationConfig.from_dict(content.pop("segmentation"))
            settings = {name: value for name, value in content.items() if name not in _NOT_FIELDS}
            return cls(segmentation=segmentation, **settings)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{directory / CARD_FILE}: not a card of this version of segrew ({error}).") from None
