"""A `transformers.Trainer` for preference pairs: its loss, its metrics, and what it writes beside the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from rich.progress import Progress
from torch import Tensor, nn
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from reward_models.card import RewardModelCard
from reward_models.losses import reward_model_loss
from reward_models.pairs import SegmentedPair, SegmentedPairs, conversations_of
from reward_models.reading import read_units
from segrew.conversations import Conversations
from segrew.run_directory import RunDirectory, write_jsonl
from segrew.segmentation import Segmentation


def collate(items: Sequence[SegmentedPair]) -> dict[str, Any]:
    """Turn pairs into rows 2i (chosen) and 2i + 1 (rejected) with their units."""
    conversations = conversations_of([item.encoded for item in items])
    units = torch.cat([item.unit_ids for item in items])[:, : max(conversations.lengths)]
    # `index` comes first: the batch's size is read off the first tensor, and is to be pairs, not rows.
    return {
        "index": torch.tensor([item.place for item in items]),
        "conversations": conversations,
        "unit_ids": units,
    }


def score_rows(
    model: nn.Module, card: RewardModelCard, *, conversations: Conversations, unit_ids: Int64[Tensor, "b t"]
) -> Float[Tensor, "b"]:
    """Return e(x, y) of each row of a batch."""
    return read_units(model, conversations, Segmentation(unit_ids), card).scores


@contextmanager
def scores_as_forward(model: nn.Module, card: RewardModelCard) -> Iterator[None]:
    """Let `model(conversations=…, unit_ids=…)` return scores.

    Whatever wraps the model (autocast, several processes, compilation) then sees the pass that is trained: to
    call parts of a wrapped model would lose mixed precision, and leave the gradients of processes unaveraged.
    """
    model.forward = partial(score_rows, model, card)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in ("forward", "_original_forward"):  # the second is where accelerate keeps the first
            model.__dict__.pop(name, None)


def pair_metrics(scores: Float[Tensor, "pairs 2"]) -> dict[str, float]:
    """Accuracy (a tie is no win), ties and mean margin of scored pairs."""
    chosen, rejected = scores.unbind(1)
    return {
        "accuracy": float((chosen > rejected).float().mean()),
        "ties": float((chosen == rejected).sum()),
        "margin": float((chosen - rejected).mean()),
    }


def evaluate_scores(
    data: SegmentedPairs, scores: Float[Tensor, "pairs 2"], *, center_rewards_coefficient: float | None = None
) -> dict[str, float]:
    """Return loss, accuracy, ties, margin and mean units of a data set whose pairs, in order, have these scores."""
    loss = reward_model_loss(
        scores.flatten(), margin=data.margins, center_rewards_coefficient=center_rewards_coefficient
    )
    units = float(data.segmentation.counts.float().mean())
    return {"loss": float(loss), **pair_metrics(scores), "units": units}


def write_scored_pairs(
    run: RunDirectory, step: int, data: SegmentedPairs, scores: Float[Tensor, "pairs 2"], limit: int
) -> None:
    """Write the first pairs with both scores to `scored_pairs/step-N.jsonl`, replacing that of an earlier try."""
    counts = data.segmentation.counts.reshape(-1, 2).tolist()
    rows = [
        {
            "step": step,
            "id": pair.id,
            "prompt": pair.prompt,
            "chosen": pair.chosen,
            "rejected": pair.rejected,
            "score_chosen": chosen,
            "score_rejected": rejected,
            "units_chosen": units[0],
            "units_rejected": units[1],
        }
        for pair, (chosen, rejected), units in zip(data.pairs[:limit], scores.tolist(), counts, strict=False)
    ]
    (run.path / "scored_pairs").mkdir(exist_ok=True)
    write_jsonl(run.path / "scored_pairs" / f"step-{step:06}.jsonl", rows)


class PairTrainer(Trainer):
    """A Trainer whose loss is Bradley-Terry on aggregated unit rewards; use it within `scores_as_forward`.

    Args:
        center_rewards_coefficient: see `reward_model_loss`.
        num_print_samples: pairs written to `scored_pairs/` at each evaluation.
        bar: where to show progress, and in words what is logged.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunDirectory,
        *,
        center_rewards_coefficient: float | None = None,
        num_print_samples: int = 0,
        bar: Progress | None = None,
        **options: Any,
    ):
        super().__init__(model, data_collator=collate, compute_metrics=self._metrics, **options)
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "DeepSpeed ZeRO-3 would divide the frozen segmenter too, which reads the answers whole. Launch with "
                "configs/accelerate/fsdp2.yaml, which divides the trained weights alike, or use --tune lora."
            )
        self.run, self.num_print_samples = run, num_print_samples
        self.center_rewards_coefficient = center_rewards_coefficient
        for theirs in (ProgressCallback, PrinterCallback):  # bars and dicts
            self.remove_callback(theirs)
        self.add_callback(_KeepLog(run))
        if bar is not None:
            self.add_callback(_ShowProgress(bar))

    def _scores(self, model: Any, inputs: dict[str, Any]) -> Float[Tensor, "b"]:
        return model(conversations=inputs["conversations"], unit_ids=inputs["unit_ids"])

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """L = −mean log σ(e_chosen − e_rejected − margin) + coefficient · mean (e_chosen + e_rejected)²."""
        margins = self.train_dataset.margins  # type: ignore[union-attr]
        if margins is not None:
            margins = margins.to(inputs["index"].device)[inputs["index"]]
        scores = self._scores(model, inputs)
        loss = reward_model_loss(scores, margin=margins, center_rewards_coefficient=self.center_rewards_coefficient)
        return (loss, scores) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the scores of both sides, and each pair's place in the data set; the loss comes from all scores."""
        with torch.no_grad():
            inputs = self._prepare_inputs(inputs)
            scores = self._scores(model, inputs)
        return None, scores.reshape(-1, 2), inputs["index"]

    def whole_weights(self) -> dict[str, Tensor] | None:
        """All weights, on the first process, where FSDP divides them; None where each process has them all."""
        return self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else None

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        found, index = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
        scores = torch.empty_like(found)
        scores[index] = found
        data: Any = self.eval_dataset
        if self.is_world_process_zero() and self.num_print_samples:
            write_scored_pairs(self.run, self.state.global_step, data, scores, self.num_print_samples)
        return evaluate_scores(data, scores, center_rewards_coefficient=self.center_rewards_coefficient)


class _KeepLog(TrainerCallback):
    """Write every log line of the Trainer to `metrics.jsonl`; on resuming, go back to what the checkpoint knows."""

    def __init__(self, run: RunDirectory):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop the lines that the resumed run will write again."""
        if state.is_world_process_zero:
            write_jsonl(self.run.path / "metrics.jsonl", [_line(entry) for entry in state.log_history])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Append the line."""
        if state.is_world_process_zero and logs:
            self.run.append("metrics.jsonl", _line({"step": state.global_step, **logs}))


class _ShowProgress(TrainerCallback):
    """Move a bar, and print every log line of the Trainer in words."""

    def __init__(self, bar: Progress):
        self.bar = bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin where the run does."""
        self.task = self.bar.add_task("Training", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One update more."""
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs:
            self.bar.console.print(in_words(state.global_step, logs), highlight=False)


def in_words(step: int, logs: dict[str, Any]) -> str:
    """Say what the Trainer logs of a step, of an evaluation, or of the whole training."""
    if "eval_loss" in logs:
        return (
            f"step {step}: held-out loss {logs['eval_loss']:.4f}, accuracy {logs['eval_accuracy']:.3f}, margin "
            f"{logs['eval_margin']:+.3f}, ties {logs['eval_ties']:.0f}"
        )
    if "train_runtime" in logs:
        took = timedelta(seconds=round(logs["train_runtime"]))
        return (
            f"{step} updates in {took}, {logs['train_samples_per_second']:.2f} pairs a second; mean loss "
            f"{logs['train_loss']:.4f}"
        )
    names = {"loss": ("loss", ".4f"), "grad_norm": ("gradient norm", ".3g"), "learning_rate": ("rate", ".3g")}
    said = [f"{name} {float(logs[key]):{form}}" for key, (name, form) in names.items() if key in logs]
    return f"step {step}: {', '.join(said)}"


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    return {"step": entry["step"], **entry}
