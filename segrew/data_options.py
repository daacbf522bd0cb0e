"""The settings of reading data: the same flags in every command that reads a data set."""

from dataclasses import dataclass, replace
from typing import Literal

from segrew.config import arg

Stage = Literal["sft", "reward", "ppo"]
STAGES: tuple[Stage, ...] = ("sft", "reward", "ppo")


@dataclass(frozen=True)
class DataOptions:
    """How rows are read and which of them are used."""

    dataset_format: str | None = arg(
        None, help="What the rows are: trl, hh, tldr, webgpt, apps, …; default by name, then by columns."
    )
    dataset_config: str | None = arg(None, help="Configuration of a hub data set, where it has several.")
    dataset_weights: list[float] | None = arg(
        None, help="Share of each data set of --dataset_name; default everything there is."
    )
    stage_split: str | None = arg(
        None, help="Parts for SFT, reward model and PPO in per cent, such as 20,40,40; no two share a prompt."
    )
    stage: Literal["sft", "reward", "ppo"] | None = arg(
        None, help="Which part of --stage_split; default the command's own."
    )
    streaming: bool = arg(False, help="Read only as many rows as are used, also from the hub; needs a maximum.")
    bad_rows: Literal["error", "skip"] = arg("error", help="Stop at an unreadable line, or count it and go on.")
    max_line_bytes: int | None = arg(None, help="Longest line of a .jsonl file that is read.")

    def __post_init__(self) -> None:
        if self.dataset_weights is not None and min(self.dataset_weights, default=0.0) <= 0:
            raise ValueError(f"--dataset_weights {self.dataset_weights}: each must be positive.")
        if self.max_line_bytes is not None and self.max_line_bytes < 1:
            raise ValueError(f"--max_line_bytes {self.max_line_bytes}: must be at least 1.")
        if self.stage is not None and self.stage_split is None:
            raise ValueError(f"--stage {self.stage}: of which parts? Add --stage_split, such as 20,40,40.")
        _ = self.stage_shares  # refuses its own bad values

    def for_stage(self, stage: Stage) -> "DataOptions":
        """Return the options of a command that reads this part where `--stage` names none."""
        return self if self.stage_split is None else replace(self, stage=self.stage or stage)

    @property
    def stage_shares(self) -> tuple[float, ...] | None:
        """The parts for SFT, reward model and PPO as shares of 1; None without a split.

        Raises:
            ValueError: not three numbers of at least 0 that add up to 100.
        """
        if self.stage_split is None:
            return None
        try:
            parts = tuple(float(part) / 100 for part in self.stage_split.split(","))
        except ValueError:
            parts = ()
        if len(parts) != 3 or min(parts) < 0 or abs(sum(parts) - 1) > 1e-9:
            raise ValueError(
                f"--stage_split {self.stage_split}: needs three percentages that add up to 100, for SFT, reward "
                "model and PPO, such as 20,40,40."
            )
        return parts
