"""The settings of a PPO run, each with the text that `segrew ppo --help` shows."""

from dataclasses import dataclass
from typing import Literal

from policy.losses import Ratio, Reduction
from policy.reward_shaping import Interpolation
from policy.rollout import Sampling
from reward_models.normalizer_parameters import Mode
from segrew.advantages import Scale
from segrew.chat import SystemRole
from segrew.config import arg
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.macro_actions import ValueScheme
from segrew.preferences import EMBEDDED_PAIRS
from segrew.rule_flags import RuleSettings
from segrew.segmentation import Rule

RewardRule = Literal["terminal", Rule]


@dataclass
class PPOConfig(RuleSettings):
    """PPO at any reward and action granularity."""

    # Models
    model_name_or_path: str = arg(
        EMBEDDED_MODEL, help="SFT model: the policy's start, its frozen reference, the critic's trunk."
    )
    reward_model_path: str = arg("", help="Directory of a reward model made by `segrew train-rm`.")
    chat_template: str | None = arg(
        None, help="raw, chatml or a .jinja file; needed for a base model without a template."
    )
    system_role: SystemRole = arg("merge", help="Where the template has none: merge it into the first turn, or refuse.")
    critic_init: Literal["sft", "reward_model"] = arg("sft", help="Where the critic's trunk and head start.")
    bf16: bool | None = arg(
        None, help="Compute in bfloat16; default where the processor has it. Trained weights stay float32."
    )
    gradient_checkpointing: bool = arg(False, help="Recompute activations in the backward pass to save memory.")
    use_peft: bool = arg(
        False, help="Train LoRA adapters of policy and critic; the reference is the policy without its adapter."
    )
    lora_r: int = arg(16, help="Rank of the LoRA adapters.")
    lora_alpha: int = arg(32, help="Scale of the LoRA adapters.")
    lora_target_modules: list[str] = arg(["all-linear"], help="Layers that get an adapter.")

    # Prompts
    dataset_name: list[str] | str = arg(
        [EMBEDDED_PAIRS], help="Prompts: files, directories, hub names, or the embedded pairs."
    )
    dataset_train_split: str = arg("train", help="Split to train on.")
    eval_dataset: str | None = arg(None, help="Prompts whose answers are scored during training.")
    dataset_test_split: str = arg("test", help="Split of --eval_dataset.")
    eval_samples: int = arg(64, help="How many evaluation prompts to answer each time.")
    max_prompt_length: int = arg(1024, help="Most tokens of a prompt.")
    overlong: Literal["drop", "truncate_prompt_left", "error"] = arg(
        "drop", help="What becomes of longer prompts: left out and counted, cut on their left, or refused."
    )
    max_prompts: int | None = arg(None, help="Use at most this many prompts: the first, or a draw of several sets.")

    # The two axes
    reward_rule: RewardRule | None = arg(
        None, help="Where rewards are read; default the reward model's own rule. terminal: its score, at the end."
    )
    action_rule: Rule = arg("token", help="Units that advantages are computed over.")
    entropy_threshold: float | None = arg(
        None, help="Nats, for an entropy rule on either axis; default the reward model's."
    )
    normalizer: Mode | None = arg(
        None,
        help="Normalize unit rewards by location, by one mean and spread of all units (global) or of last units "
        "(last), or not at all; default as the reward model was calibrated.",
    )
    interpolation: Interpolation = arg("even", help="How a unit's reward is spread over its tokens.")
    reward_clip: float = arg(10.0, help="Bound on a unit's normalized reward, before it is spread.")
    missing_eos_penalty: float | None = arg(None, help="Taken once from the last token of a cut-off answer.")

    # Rollouts
    rollout_batch_size: int = arg(64, help="Answers a step, over all processes.")
    max_new_tokens: int = arg(128, help="Longest answer.")
    temperature: float = arg(1.0, help="Of sampling and of every log-probability.")
    stop_token_ids: list[int] = arg([], help="Stop tokens besides the chat template's.")
    stop_strings: list[str] = arg([], help="Texts that end an answer.")
    local_rollout_forward_batch_size: int = arg(32, help="Rows of a pass without gradients, generation included.")

    # PPO
    total_steps: int = arg(100, help="PPO steps: one batch of rollouts each.")
    num_ppo_epochs: int = arg(1, help="Passes over each batch of rollouts.")
    num_mini_batches: int = arg(1, help="Optimizer steps in each pass.")
    per_device_train_batch_size: int = arg(8, help="Rows of a forward and backward pass.")
    kl_coef: float = arg(0.05, help="Weight of the per-token KL (k1) to the reference in the reward.")
    cliprange: float = arg(0.2, help="Clip of the policy ratio.")
    cliprange_value: float | None = arg(0.2, help="Clip of the value update.")
    vf_coef: float = arg(1.0, help="Weight of the value loss.")
    gamma: float = arg(1.0, help="Discount.")
    lam: float = arg(0.95, help="Lambda of generalized advantage estimation.")
    gamma_scale: Scale = arg("unit", help="Discount per unit, or per token of a unit.")
    lambda_scale: Scale = arg("unit", help="Lambda per unit, or per token of a unit.")
    value_scheme: ValueScheme = arg("mean", help="Value of a unit from those of its tokens.")
    ratio: Ratio = arg("token", help="Importance ratio per token, or joint or geometric mean over a unit.")
    loss_reduction: Reduction = arg("token", help="Mean of the policy loss over tokens, responses or units.")
    whiten_advantages: bool = arg(True, help="Standardize advantages over all answer tokens of a batch.")

    # Optimizer
    learning_rate: float = arg(1e-6, help="Of the policy.")
    critic_learning_rate: float = arg(1e-5, help="Of the critic.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = arg("constant", help="Schedule after the warm-up.")
    warmup_steps: int = arg(0, help="Optimizer steps of linear warm-up.")
    adam_beta1: float = arg(0.9, help="AdamW.")
    adam_beta2: float = arg(0.95, help="AdamW.")
    weight_decay: float = arg(0.0, help="AdamW.")
    max_grad_norm: float = arg(1.0, help="Gradient clipping, of policy and critic apart.")

    # The run
    output_dir: str = arg("runs/ppo", help="Directory for the policy, metrics, samples and checkpoints.")
    overwrite_output_dir: bool = arg(False, help="Replace the run that --output_dir holds.")
    resume_from_checkpoint: str | None = arg(None, help="latest, or a checkpoint directory of this run.")
    seed: int = arg(0, help="Of everything random.")
    eval_steps: int = arg(10, help="PPO steps between two evaluations.")
    save_steps: int = arg(50, help="PPO steps between two checkpoints; 0 for none.")
    save_total_limit: int | None = arg(2, help="Newest checkpoints to keep.")
    samples_per_step: int = arg(4, help="Answers a step that go to samples.jsonl with their segments.")
    report_to: str = arg("none", help="tensorboard, wandb or another tracker of accelerate.")

    def __post_init__(self) -> None:
        if not self.reward_model_path:
            raise ValueError("--reward_model_path is missing: name a directory made by `segrew train-rm`.")
        _ = self.sampling  # refuses its own bad values
        self.rule_named(self.action_rule)
        positive = (
            "rollout_batch_size", "per_device_train_batch_size", "local_rollout_forward_batch_size", "num_ppo_epochs",
            "num_mini_batches", "max_prompt_length", "eval_steps", "eval_samples", "lora_r",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1.")
        for name in ("total_steps", "kl_coef", "save_steps", "warmup_steps", "samples_per_step", "vf_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} {getattr(self, name)}: must not be negative.")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must lie between 0 and 1.")
        for name in ("cliprange", "cliprange_value", "reward_clip", "max_grad_norm"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"--{name} {getattr(self, name)}: must be positive.")
        if self.num_mini_batches > self.rollout_batch_size:
            raise ValueError(
                f"--num_mini_batches {self.num_mini_batches}: more parts than --rollout_batch_size "
                f"{self.rollout_batch_size} has answers."
            )

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=tuple(self.stop_token_ids),
            stop_strings=tuple(self.stop_strings),
            batch_size=self.local_rollout_forward_batch_size,
        )
