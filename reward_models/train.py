"""Train a segment reward model from preference pairs on `transformers.Trainer` (`segrew train-rm`)."""

import pickle
import warnings
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from reward_models.checkpoints import ATTENTION, add_unit_attention, load_classifier, require_head
from reward_models.frozen_trunk import fit_head, scores_of
from reward_models.hub import claim_repository, push
from reward_models.model_card import write_model_card
from reward_models.pair_trainer import PairTrainer, evaluate_scores, scores_as_forward, write_scored_pairs
from reward_models.pairs import unit_states
from reward_models.segment_reward_model import SegmentRewardModel
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments, unread_flags
from reward_models.train_inputs import Prepared, data_records, load_pairs, prepare
from segrew import processes
from segrew.chat import ChatFormat
from segrew.config import parse, to_dict
from segrew.cpu import fit_to_cpu
from segrew.data_options import DataOptions
from segrew.language_models import load_tokenizer, require_context
from segrew.liger import apply_liger_kernel
from segrew.metrics import wilson_interval
from segrew.preferences import longer_wins
from segrew.run_directory import RUN_FILE, RunDirectory, read_json, require_same_settings
from segrew.sources import names_of, write_records


def _turn_off_dropout(model: nn.Module) -> None:
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _with_lora(model: nn.Module, config: RewardModelConfig) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    heads = ["score", ATTENTION] if hasattr(model, ATTENTION) else ["score"]
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,  # makes peft train and save the head
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=config.lora_target_modules or "all-linear",
        exclude_modules=heads,
        modules_to_save=heads,
    )
    adapted: nn.Module = get_peft_model(model, lora)  # type: ignore[arg-type]
    fit_to_cpu(adapted)
    return adapted


def _train_head(prepared: Prepared, model: Any, config: RewardModelConfig, run: RunDirectory) -> dict[str, float]:
    card, coefficient = prepared.card, config.center_rewards_coefficient
    how: dict[str, Any] = {"aggregator": card.aggregator, "temperature": card.temperature}
    states, unit_mask = unit_states(prepared.train, card.read_position)
    weight = fit_head(
        states,
        unit_mask,
        penalty=config.head_penalty,
        margin=prepared.train.margins,
        center_rewards_coefficient=coefficient,
        **how,
    )
    model.score.weight.data.copy_(weight[None])
    metrics: dict[str, float] = {}
    for name, data in (("train", prepared.train), ("eval", prepared.test)):
        if data is None:
            continue
        states, unit_mask = unit_states(data, card.read_position)
        scores = scores_of(weight, states.float(), unit_mask, **how).reshape(-1, 2)
        found = evaluate_scores(data, scores, center_rewards_coefficient=coefficient)
        metrics |= {f"{name}_{key}": value for key, value in found.items()}
        if name == "eval" and config.num_print_samples:
            write_scored_pairs(run, 1, data, scores, config.num_print_samples)
    run.append("metrics.jsonl", {"step": 1, **metrics})
    return metrics


# What a resumed run may change without ceasing to be the same run, and what of the Trainer's own it may not.
FREE_ON_RESUME = {
    "overwrite_output_dir", "num_print_samples", "lora_merge", "eval_dataset_name", "dataset_test_split",
    "max_tokens_per_batch",
}  # fmt: skip
KEPT_ON_RESUME = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed", "data_seed", "bf16", "fp16",
)  # fmt: skip


def _checkpoint_of(config: RewardModelConfig, args: TrainingArguments, options: DataOptions) -> str | None:
    """Return the training checkpoint to go on from, if one is asked for.

    Raises:
        ValueError: there is none, it lacks its head, or it was made with other settings.
    """
    wanted = args.resume_from_checkpoint
    if not wanted:
        return None
    if str(wanted).lower() in ("true", "last", "latest"):
        wanted = get_last_checkpoint(args.output_dir)
    if wanted is None or not Path(wanted).is_dir():
        raise ValueError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint}: no checkpoint there; checkpoints of "
            f"{args.output_dir} are its folders checkpoint-N (--save_strategy says when they are written)."
        )
    require_head(Path(wanted))
    record = Path(wanted).parent / RUN_FILE
    if not record.is_file():
        raise ValueError(f"--resume_from_checkpoint {wanted}: lies in no run, whose {RUN_FILE} would say its settings.")
    own = {name: value for name, value in to_dict(config, options).items() if name not in FREE_ON_RESUME}
    of_trainer = args.to_dict()
    matter = own | {name: of_trainer[name] for name in KEPT_ON_RESUME}
    require_same_settings(read_json(record)["config"], matter, wanted)
    return str(wanted)


def _train_with_trainer(
    prepared: Prepared,
    model: nn.Module,
    config: RewardModelConfig,
    args: TrainingArguments,
    run: RunDirectory,
    checkpoint: str | None,
    console: Console,
) -> tuple[dict[str, float], dict[str, Tensor] | None]:
    """Train; return the metrics, and all weights where processes divide them."""
    args = copy(args)
    args.push_to_hub = False  # the finished directory is pushed, not what lies there on the way
    args.use_liger_kernel = False  # it is in the layers; the Trainer would put a language model's forward above them
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=bool(args.disable_tqdm) or console.quiet)
    with bar, scores_as_forward(model, prepared.card):
        trainer = PairTrainer(
            model,
            run,
            center_rewards_coefficient=config.center_rewards_coefficient,
            num_print_samples=config.num_print_samples,
            bar=bar,
            args=args,
            train_dataset=prepared.train,
            eval_dataset=prepared.test,
        )
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except pickle.UnpicklingError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{checkpoint}: a file holds more than plain data, or is damaged ({reason})") from None
        metrics = trainer.evaluate() if prepared.test is not None else {}
        return metrics, trainer.whole_weights()


def _report(
    metrics: dict[str, float], prepared: Prepared, config: RewardModelConfig, console: Console
) -> dict[str, Any]:
    """Print the accuracy on held-out pairs with its interval, beside the length baseline; return evaluation.json."""
    dataset = ", ".join(names_of(config.dataset_name))
    summary = {"dataset": dataset, "train_pairs": len(prepared.train)}
    if prepared.test is None:
        return summary
    n = len(prepared.test)
    longer = longer_wins(prepared.test.pairs)
    low, high = wilson_interval(round(metrics["eval_accuracy"] * n), n)
    console.print(
        f"Held-out accuracy {metrics['eval_accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}, n {n}, "
        f'ties {metrics["eval_ties"]:.0f}); "the longer answer wins" {longer:.3f}'
    )
    return summary | {
        "eval_dataset": config.eval_dataset_name or dataset,
        "accuracy": metrics["eval_accuracy"],
        "ci95": [low, high],
        "n": n,
        "length_baseline": longer,
    }


def _fit(
    prepared: Prepared,
    model: Any,
    config: RewardModelConfig,
    args: TrainingArguments,
    run: RunDirectory,
    checkpoint: str | None,
    console: Console,
) -> tuple[nn.Module, dict[str, float]]:
    if args.use_liger_kernel:
        apply_liger_kernel(model, prepared.segmenter, kernels=args.liger_kernel_config)
    model = _trainable(model, config)
    if config.tune == "head":
        return model, _train_head(prepared, model, config, run)
    metrics, whole = _train_with_trainer(prepared, model, config, args, run, checkpoint, console)
    if whole:
        model = _trainable(load_classifier(config.model_name_or_path, new_head=True, dtype=torch.float32), config)
        model.load_state_dict(whole)
    return model, metrics


def _trainable(model: Any, config: RewardModelConfig) -> nn.Module:
    if hasattr(model, "peft_config"):  # an adapter to start from becomes part of its base
        model = model.merge_and_unload()
    model.requires_grad_(True)
    _turn_off_dropout(model)
    if config.tune == "head":
        return model
    if config.aggregator != "learned":
        model._modules.pop(ATTENTION, None)  # of a reward model to start from
    elif not hasattr(model, ATTENTION):
        add_unit_attention(model)
    return _with_lora(model, config) if config.tune == "lora" else model


def train_reward_model(
    config: RewardModelConfig,
    args: TrainingArguments,
    console: Console | None = None,
    options: DataOptions | None = None,
) -> SegmentRewardModel:
    """Train, evaluate and write a reward-model directory.

    Under `torchrun` or `accelerate launch` each process takes its share of every batch; the first one writes.

    Raises:
        ValueError: the data, the model or the output directory cannot be used; the message says why.
    """
    first = processes.is_main()
    console = console or Console(quiet=not first)
    assert args.output_dir is not None
    run, options = RunDirectory(args.output_dir), options or DataOptions()
    claim: dict[str, Any] = {"command": "train-rm", "config": to_dict(config, args, options)}
    claim |= {"overwrite": config.overwrite_output_dir, "resume": bool(args.resume_from_checkpoint)}
    if first:
        run.check(**claim)
    if config.tune == "head" and args.resume_from_checkpoint:
        raise ValueError(
            "--resume_from_checkpoint: --tune head fits its head in one go and has no checkpoints; leave it out."
        )
    if config.tune != "head" and args.num_train_epochs <= 0 and args.max_steps <= 0:
        raise ValueError(
            f"--num_train_epochs {args.num_train_epochs:g}: trains nothing, so the head would stay random; set more "
            "than 0, or --max_steps."
        )
    checkpoint = None if config.tune == "head" else _checkpoint_of(config, args, options)
    if unread := unread_flags(config, args):
        names = ", ".join(f"--{name}" for name in unread)
        warnings.warn(f"{names}: without effect with --tune {config.tune}.", stacklevel=2)
    repository = claim_repository(args) if args.push_to_hub and first else None
    tokenizer = load_tokenizer(config.model_name_or_path)
    chat = ChatFormat.from_tokenizer(tokenizer, config.chat_template, config.system_role)
    loaded = load_pairs(config, options, args.seed, console)
    set_seed(args.seed)  # of the new head, and of LoRA's first weights
    model: Any = load_classifier(config.model_name_or_path, new_head=True, dtype=torch.float32)
    require_context(model, config.max_length, config.model_name_or_path)
    with args.main_process_first(desc="reading the segmenter"):  # the others find its entropies in the cache
        prepared = prepare(config, args, chat, loaded, console)
    if first:
        RunDirectory.create(args.output_dir, **claim)
        write_records(run.path, data_records(loaded, (prepared.train, prepared.test)))
    model.to(next(prepared.segmenter.parameters()).device)
    with run.given_back_without("metrics.jsonl") if first else nullcontext():
        model, metrics = _fit(prepared, model, config, args, run, checkpoint, console)
    summary = _report(metrics, prepared, config, console)
    reward_model = SegmentRewardModel(model.eval(), prepared.chat, prepared.card, segmenter=prepared.segmenter)
    if not first:
        return reward_model
    reward_model.save_pretrained(run.path, merge=config.lora_merge)
    run.write_json("evaluation.json", summary | ({"repository": repository} if repository else {}))
    write_model_card(run.path)
    console.print(f"Reward model written to {run.path}; next: segrew calibrate --reward_model {run.path}")
    if repository is not None:
        console.print(f"Pushed to {push(run.path, repository, args)}")
    return reward_model


def main(argv: list[str]) -> None:
    """Run `segrew train-rm`."""
    config, args, options = parse("train-rm", (RewardModelConfig, RewardTrainingArguments, DataOptions), argv)
    train_reward_model(config, args, options=options)
