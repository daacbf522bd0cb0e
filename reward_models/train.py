"""Train a segment reward model from preference pairs on `transformers.Trainer` (`segrew train-rm`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from rich.console import Console
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments, set_seed

from reward_models.checkpoints import load_classifier
from reward_models.frozen_trunk import fit_head, scores_of
from reward_models.losses import preference_loss
from reward_models.model_card import write_model_card
from reward_models.pairs import SegmentedPairs, conversations_of, segment_pairs, unit_states
from reward_models.segment_reward_model import CARD_FILE, RewardModelCard, SegmentRewardModel, read_rewards
from segrew.aggregation import aggregate
from segrew.chat import ChatFormat
from segrew.config import arg, parse, to_dict
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import (
    best_dtype,
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    plain_model,
    response_states,
)
from segrew.metrics import wilson_interval
from segrew.preferences import EMBEDDED_PAIRS, EncodedPair, load_preferences, longer_wins
from segrew.rule_flags import RuleFlags
from segrew.run_directory import RunDirectory
from segrew.segmentation import Segmentation, read_columns
from segrew.text_rules import warn_of_fallbacks


@dataclass
class RewardModelConfig(RuleFlags):
    """What the reward model is: base, data, rule, aggregator, and which weights learn."""

    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Causal model to start from; it also cuts the responses.")
    dataset_name: str = arg(EMBEDDED_PAIRS, help="Preference pairs: file, directory, hub name, or 'everyday'.")
    dataset_train_split: str = arg("train", help="Split to train on.")
    dataset_test_split: str | None = arg("test", help="Split to evaluate on; null for none.")
    eval_dataset_name: str | None = arg(None, help="Pairs to evaluate on, if not a split of --dataset_name.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    read_position: Literal["end", "content"] = arg("end", help="Read the last unit at the stop token, or before it.")
    aggregator: Literal["mean", "sum", "softmax", "softmin", "log_mean_exp", "softmax_weighted"] = arg(
        "mean", help="How unit rewards become the score."
    )
    temperature: float = arg(1.0, help="Of the soft aggregators.")
    tune: Literal["lora", "full", "head"] = arg(
        "lora", help="Weights that learn: LoRA, all, or a head on cached states."
    )
    lora_r: int = arg(16, help="LoRA rank.")
    lora_alpha: int = arg(32, help="LoRA alpha.")
    lora_target_modules: list[str] | None = arg(None, help="Layers that get LoRA; default all linear ones.")
    lora_merge: bool = arg(True, help="Export merged weights; false exports the adapter with its head.")
    head_penalty: float = arg(0.1, help="Strength of the quadratic penalty on the head with --tune head.")
    max_length: int = arg(1024, help="Tokens of prompt and response together; the prompt is cut on its left first.")
    max_pairs: int | None = arg(None, help="Use only the first pairs of each split.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")

    def __post_init__(self) -> None:
        rule = self.segmentation()  # refuses its own bad values
        if "generator" in rule.reads:
            raise ValueError(
                f"--rule {self.rule}: draws other units each time, and a reward model is read at the same ones always; "
                "it is for --action_rule of `segrew ppo`."
            )
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature}: must be positive.")
        if self.max_length < 8:
            raise ValueError(f"--max_length {self.max_length}: no room for an answer; use at least 8.")
        if self.head_penalty < 0:
            raise ValueError(f"--head_penalty {self.head_penalty}: must not be negative.")
        if self.lora_r < 1:
            raise ValueError(f"--lora_r {self.lora_r}: must be at least 1.")


@dataclass
class RewardTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with defaults that suit reward models."""

    output_dir: str | None = arg("runs/reward_model", help="Where the reward model goes.")
    learning_rate: float = arg(1e-4, help="Peak learning rate (1e-4 suits LoRA; full fine-tuning wants 1e-6 to 1e-5).")
    num_train_epochs: float = arg(1.0, help="Passes over the training pairs.")
    lr_scheduler_type: str = arg("cosine", help="Schedule of the learning rate.")
    warmup_steps: float = arg(0.03, help="Warm-up: steps, or a share of them below 1.")
    logging_steps: float = arg(10.0, help="Log every so many updates.")
    bf16: bool = field(
        default_factory=lambda: (
            best_dtype(torch.accelerator.current_accelerator() or torch.device("cpu")) == torch.bfloat16
        ),
        metadata={"help": "Autocast to bfloat16; on by default where the processor computes in it."},
    )
    use_cpu: bool = field(
        default_factory=lambda: torch.accelerator.current_accelerator() is None,
        metadata={"help": "Train on the CPU; on by default where there is no accelerator."},
    )
    report_to: str | None = arg("none", help="Trackers: wandb, tensorboard, trackio, …")
    dataloader_pin_memory: bool = field(
        default_factory=lambda: torch.accelerator.current_accelerator() is not None,
        metadata={"help": "Pin host memory; on by default where there is an accelerator."},
    )
    remove_unused_columns: bool = arg(False, help="Kept off: the collator reads every field.")


def collate(items: list[tuple[EncodedPair, Int64[Tensor, "2 t"]]]) -> dict[str, Any]:
    """Turn pairs into rows 2i (chosen) and 2i + 1 (rejected) with their units."""
    conversations = conversations_of([pair for pair, _ in items])
    units = torch.cat([ids for _, ids in items])[:, : max(conversations.lengths)]
    return {"conversations": conversations, "unit_ids": units}


class PairTrainer(Trainer):
    """A Trainer whose loss is Bradley-Terry on aggregated unit rewards."""

    def __init__(self, card: RewardModelCard, **options: Any):
        super().__init__(data_collator=collate, compute_metrics=pair_metrics, **options)
        self.card = card

    def scores(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return e(x, y) of each row of a batch."""
        conversations, card = inputs["conversations"], self.card
        segmentation = Segmentation(inputs["unit_ids"])
        states = response_states(model, conversations).at
        columns = read_columns(segmentation, conversations.ended.to(states.device), card.read_position)  # type: ignore[arg-type]
        rewards = read_rewards(plain_model(model).score, states, columns, segmentation.unit_mask)
        return aggregate(rewards, segmentation.unit_mask, kind=card.aggregator, temperature=card.temperature)  # type: ignore[arg-type]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """L = −mean log σ(e_chosen − e_rejected)."""
        scores = self.scores(self.accelerator.unwrap_model(model), inputs)
        loss = preference_loss(scores[0::2], scores[1::2])
        return (loss, scores) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return loss and the scores of both sides."""
        with torch.no_grad():
            loss, scores = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return loss, torch.stack([scores[0::2], scores[1::2]], 1), torch.zeros(len(scores) // 2)


def pair_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy (a tie is no win), ties and mean margin of scored pairs."""
    chosen, rejected = torch.as_tensor(prediction.predictions).unbind(1)
    return {
        "accuracy": float((chosen > rejected).float().mean()),
        "ties": float((chosen == rejected).sum()),
        "margin": float((chosen - rejected).mean()),
    }


class _KeepLog(TrainerCallback):
    """Write every log line of the Trainer to `metrics.jsonl`."""

    def __init__(self, run: RunDirectory):
        self.run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Append the line."""
        if state.is_world_process_zero and logs:
            self.run.append("metrics.jsonl", {"step": state.global_step, **logs})


def _turn_off_dropout(model: nn.Module) -> None:
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _with_lora(model: nn.Module, config: RewardModelConfig) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,  # makes peft train and save the head
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=config.lora_target_modules or "all-linear",
        modules_to_save=["score"],
    )
    return get_peft_model(model, lora)  # type: ignore[arg-type]


def _load_pairs(config: RewardModelConfig, console: Console) -> tuple[list, list]:
    splits: list[list] = [[], []]
    sources = [(config.dataset_name, config.dataset_train_split)]
    if config.dataset_test_split or config.eval_dataset_name:
        source = config.eval_dataset_name or config.dataset_name
        if source == config.dataset_name and Path(source).exists():
            console.print("A local file has no splits: no evaluation pairs (name some with --eval_dataset_name).")
        else:
            sources.append((source, config.dataset_test_split or "test"))
    for i, (name, split) in enumerate(sources):
        loaded = load_preferences(name, split)
        splits[i] = loaded.pairs[: config.max_pairs]
        left_out = "".join(f", {count} left out: {reason}" for reason, count in loaded.skipped.items())
        console.print(f"{('Training', 'Evaluation')[i]} pairs: {len(splits[i])} from {name}{left_out}")
    return splits[0], splits[1]


@dataclass(frozen=True)
class _Prepared:
    """Everything that both ways of training start from."""

    chat: ChatFormat
    segmenter: nn.Module
    card: RewardModelCard
    train: SegmentedPairs
    test: SegmentedPairs | None


def _segmenter_name(config: RewardModelConfig) -> str:
    """Name the SFT model that cuts responses: the model to start from, or what that reward model was made of."""
    start = Path(config.model_name_or_path)
    if not (start / CARD_FILE).exists():
        return config.model_name_or_path
    card = RewardModelCard.load(start)
    if config.tune == "head" and not card.trunk_is_segmenter:
        raise ValueError(
            f"--tune head reads the states of the frozen segmenter, and {start} has a trunk of its own; "
            "use --tune lora or full, or start from a language model."
        )
    return card.base_model


def _prepare(
    config: RewardModelConfig, args: TrainingArguments, pairs: tuple[list, list], console: Console
) -> _Prepared:
    train_pairs, test_pairs = pairs
    tokenizer = load_tokenizer(config.model_name_or_path)
    chat = ChatFormat.from_tokenizer(tokenizer, config.chat_template)
    base_model = _segmenter_name(config)
    segmenter = load_causal_lm(base_model)
    shared: dict[str, Any] = {
        "max_length": config.max_length,
        "batch_size": args.per_device_eval_batch_size,
        "with_states": config.tune == "head",
        "fingerprint": model_fingerprint(segmenter),
    }
    label = "Segmenting" if config.tune != "head" else "Segmenting and reading"
    train = segment_pairs(train_pairs, chat, config.segmentation(), segmenter, description=f"{label} train", **shared)
    if len(train) < len(train_pairs):
        console.print(f"{len(train_pairs) - len(train)} training pairs left out: identical within --max_length")
    test = None
    if test_pairs:
        test = segment_pairs(test_pairs, chat, train.rule, segmenter, description=f"{label} test ", **shared)
    warn_of_fallbacks(data.segmentation for data in (train, test) if data is not None)
    lengths = train.segmentation.lengths[train.segmentation.unit_mask].float()
    console.print(
        f"Rule {train.rule.label}: {train.segmentation.counts.float().mean():.1f} units a response, "
        f"{lengths.mean():.2f} tokens a unit"
    )
    card = RewardModelCard(
        segmentation=train.rule,
        base_model=base_model,
        segmenter_fingerprint=shared["fingerprint"],
        tokenizer_fingerprint=chat.fingerprint,
        read_position=config.read_position,
        aggregator=config.aggregator,
        temperature=config.temperature,
        max_length=config.max_length,
        trunk_is_segmenter=config.tune == "head",
    )
    return _Prepared(chat, segmenter, card, train, test)


def _train_head(prepared: _Prepared, model: Any, config: RewardModelConfig, run: RunDirectory) -> dict[str, float]:
    card = prepared.card
    options: dict[str, Any] = {"aggregator": card.aggregator, "temperature": card.temperature}
    states, unit_mask = unit_states(prepared.train, card.read_position)
    weight = fit_head(states, unit_mask, penalty=config.head_penalty, **options)
    model.score.weight.data.copy_(weight[None])
    metrics: dict[str, float] = {}
    for name, data in (("train", prepared.train), ("eval", prepared.test)):
        if data is None:
            continue
        states, unit_mask = unit_states(data, card.read_position)
        scores = scores_of(weight, states.float(), unit_mask, **options)
        stacked = EvalPrediction(predictions=torch.stack([scores[0::2], scores[1::2]], 1).numpy(), label_ids=None)  # type: ignore[arg-type]
        metrics |= {f"{name}_loss": float(preference_loss(scores[0::2], scores[1::2]))}
        metrics |= {f"{name}_{key}": value for key, value in pair_metrics(stacked).items()}
    run.append("metrics.jsonl", {"step": 1, **metrics})
    return metrics


def _train_with_trainer(
    prepared: _Prepared, model: nn.Module, args: TrainingArguments, run: RunDirectory
) -> dict[str, float]:
    trainer = PairTrainer(
        prepared.card,
        model=model,
        args=args,
        train_dataset=prepared.train,
        eval_dataset=prepared.test,
        callbacks=[_KeepLog(run)],
    )
    checkpoint = args.resume_from_checkpoint
    if isinstance(checkpoint, str) and checkpoint.lower() in ("true", "last", "latest"):
        checkpoint = True  # type: ignore[assignment]
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.evaluate() if prepared.test is not None else {}


def _report(metrics: dict[str, float], test: SegmentedPairs | None, console: Console) -> dict[str, Any]:
    """Print the accuracy on held-out pairs with its interval, beside the length baseline."""
    if test is None:
        return {}
    n = len(test)
    longer = longer_wins(test.pairs)
    low, high = wilson_interval(round(metrics["eval_accuracy"] * n), n)
    console.print(
        f"Held-out accuracy {metrics['eval_accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}, n {n}, "
        f'ties {metrics["eval_ties"]:.0f}); "the longer answer wins" {longer:.3f}'
    )
    return {"accuracy": metrics["eval_accuracy"], "ci95": [low, high], "n": n, "length_baseline": longer}


def train_reward_model(
    config: RewardModelConfig, args: TrainingArguments, console: Console | None = None
) -> SegmentRewardModel:
    """Train, evaluate and write a reward-model directory.

    Raises:
        ValueError: the data, the model or the output directory cannot be used; the message says why.
    """
    console = console or Console()
    assert args.output_dir is not None
    may: dict[str, bool] = {"overwrite": config.overwrite_output_dir, "resume": bool(args.resume_from_checkpoint)}
    RunDirectory(args.output_dir).check(**may)
    pairs = _load_pairs(config, console)
    set_seed(args.seed)  # of the new head, and of LoRA's first weights
    model: Any = load_classifier(config.model_name_or_path, new_head=True, dtype=torch.float32)
    prepared = _prepare(config, args, pairs, console)
    run = RunDirectory.create(args.output_dir, command="train-rm", config=to_dict(config, args), **may)
    model.to(next(prepared.segmenter.parameters()).device)
    _turn_off_dropout(model)
    if config.tune == "head":
        metrics = _train_head(prepared, model, config, run)
    else:
        if config.tune == "lora":
            model = _with_lora(model, config)
        metrics = _train_with_trainer(prepared, model, args, run)
    summary = _report(metrics, prepared.test, console)
    reward_model = SegmentRewardModel(model.eval(), prepared.chat, prepared.card, segmenter=prepared.segmenter)
    reward_model.save_pretrained(run.path, merge=config.lora_merge)
    run.write_json("evaluation.json", summary)
    write_model_card(
        run.path,
        prepared.card,
        summary,
        dataset=config.dataset_name,
        pairs=len(prepared.train),
        pad_token_id=prepared.chat.tokenizer.pad_token_id,
    )
    console.print(f"Reward model written to {run.path}; next: segrew calibrate --reward_model {run.path}")
    return reward_model


def main(argv: list[str]) -> None:
    """Run `segrew train-rm`."""
    config, args = parse("train-rm", (RewardModelConfig, RewardTrainingArguments), argv)
    train_reward_model(config, args)
