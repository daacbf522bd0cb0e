"""Settings of `segrew train-rm`."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments

from segrew.aggregation import Aggregator
from segrew.chat import SystemRole
from segrew.config import arg, given
from segrew.conversations import TOKENS_PER_BATCH
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.encoding import Overlong, require_room
from segrew.language_models import best_dtype
from segrew.liger import check_liger_kernel
from segrew.preferences import EMBEDDED_PAIRS
from segrew.rule_flags import RuleFlags


@dataclass
class RewardModelConfig(RuleFlags):
    """What the reward model is: base, data, rule, aggregator, and which weights learn."""

    model_name_or_path: str = arg(EMBEDDED_MODEL, help="Causal model, or reward model, to start from.")
    segmenter_name_or_path: str | None = arg(
        None, help="Frozen model that cuts the responses; default the one to start from, or what that was made of."
    )
    dataset_name: list[str] | str = arg(
        [EMBEDDED_PAIRS], help="Preference pairs: files, directories, hub names, 'everyday'."
    )
    dataset_train_split: str = arg("train", help="Split to train on.")
    dataset_test_split: str | None = arg("test", help="Split to evaluate on; null for none.")
    eval_dataset_name: str | None = arg(None, help="Pairs to evaluate on, if not a split of --dataset_name.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    system_role: SystemRole = arg("merge", help="Where the template has none: merge it into the first turn, or refuse.")
    read_position: Literal["end", "content"] = arg("end", help="Read the last unit at the stop token, or before it.")
    aggregator: Aggregator = arg("mean", help="How unit rewards become the score; see docs/aggregators.md.")
    temperature: float = arg(1.0, help="Of the soft aggregators and of the attention of 'learned'.")
    center_rewards_coefficient: float | None = arg(
        None, help="Weight of the mean of (e_chosen + e_rejected)², which keeps scores near 0; 0.01 is usual."
    )
    tune: Literal["lora", "full", "head"] = arg(
        "lora", help="Weights that learn: LoRA, all, or a head on cached states."
    )
    lora_r: int = arg(16, help="LoRA rank.")
    lora_alpha: int = arg(32, help="LoRA alpha.")
    lora_target_modules: list[str] | None = arg(None, help="Layers that get LoRA; default all linear ones.")
    lora_merge: bool = arg(True, help="Export merged weights; false exports the adapter with its head.")
    head_penalty: float = arg(0.1, help="Strength of the quadratic penalty on the head with --tune head.")
    max_length: int = arg(1024, help="Tokens of prompt and response together.")
    overlong: Overlong = arg("truncate_prompt_left", help="What becomes of more tokens: what is cut first, or neither.")
    max_tokens_per_batch: int = arg(
        TOKENS_PER_BATCH, help="Tokens of a forward pass of the frozen segmenter, each prompt counted once."
    )
    max_pairs: int | None = arg(
        None, help="Use at most so many pairs of each split: the first, or a draw from several."
    )
    num_print_samples: int = arg(16, help="Scored pairs written to scored_pairs/ at each evaluation.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")

    def __post_init__(self) -> None:
        rule = self.segmentation()  # refuses its own bad values
        if "generator" in rule.reads:
            raise ValueError(
                f"--rule {self.rule}: draws other units each time, and a reward model is read at the same ones always; "
                "it is for --action_rule of `segrew ppo`."
            )
        if self.compat and self.read_position != "end":
            raise ValueError(
                f"--compat {self.compat} with --read_position {self.read_position}: the stop token is in no unit "
                "there, so the last unit ends before it anyway; leave --read_position out."
            )
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature}: must be positive.")
        require_room(self.max_length)
        if self.head_penalty < 0:
            raise ValueError(f"--head_penalty {self.head_penalty}: must not be negative.")
        if self.lora_r < 1:
            raise ValueError(f"--lora_r {self.lora_r}: must be at least 1.")
        if self.center_rewards_coefficient is not None and self.center_rewards_coefficient < 0:
            raise ValueError(f"--center_rewards_coefficient {self.center_rewards_coefficient}: must not be negative.")
        if self.aggregator == "learned" and self.tune == "head":
            raise ValueError(
                "--aggregator learned with --tune head: the frozen trunk's fit finds one linear head, and 'learned' "
                "has a second one, for the attention over units; use --tune lora or full."
            )


# What only one --tune reads, and what of the Trainer's the fit of a head does not.
OF_LORA, OF_HEAD = ("lora_r", "lora_alpha", "lora_target_modules", "lora_merge"), ("head_penalty",)
OF_TRAINER = (
    "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim",
    "per_device_train_batch_size", "gradient_accumulation_steps", "eval_strategy",
    "save_strategy", "load_best_model_at_end",
)  # fmt: skip


def unread_flags(config: RewardModelConfig, args: TrainingArguments) -> list[str]:
    """Names of the flags that differ from their default and that the chosen --tune does not read."""
    unread = {"lora": OF_HEAD, "full": OF_LORA + OF_HEAD, "head": OF_LORA + OF_TRAINER}[config.tune]
    return given(unread, config, args)


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

    def __post_init__(self) -> None:
        if self.fp16 and torch.accelerator.current_accelerator() is None:
            raise ValueError(
                "--fp16 true: float16 needs an accelerator, which scales the loss so that small gradients survive; on "
                "this machine use --bf16 true, or neither for float32."
            )
        if self.use_liger_kernel:
            check_liger_kernel()
        super().__post_init__()
