"""The settings of a PPO run, each with the text that `segrew ppo --help` shows."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from policy.code_rewards import CodeExecution
from policy.engines import EngineSettings
from policy.estimators import Compat, Estimator, Whitening
from policy.kl_control import KLController, KLEstimator, KLPlace
from policy.losses import Ratio, Reduction
from policy.ppo_checks import check_settings
from policy.reward_shaping import Interpolation, RewardScale
from policy.sampling import Sampling
from reward_models.normalizer_parameters import Mode
from segrew.advantages import Scale
from segrew.chat import SystemRole
from segrew.config import arg
from segrew.conversations import TOKENS_PER_BATCH
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.macro_actions import ValueScheme
from segrew.preferences import EMBEDDED_PAIRS
from segrew.rule_flags import RuleSettings
from segrew.segmentation import Rule

RewardRule = Literal["terminal", Rule]


@dataclass
class PPOConfig(RuleSettings, CodeExecution, EngineSettings):
    """PPO at any reward and action granularity."""

    HEADINGS: ClassVar = {
        "model_name_or_path": "Models and rewards",
        "dataset_name": "Prompts",
        "output_dir": "The run",
        "reward_rule": "The two axes",
        "rollout_batch_size": "Rollouts",
        "total_steps": "PPO",
        "learning_rate": "Optimizer",
    }

    # Models
    model_name_or_path: str = arg(
        EMBEDDED_MODEL, help="SFT model: the policy's start, its frozen reference, the critic's trunk."
    )
    reward_model_path: str = arg("", help="Directory of a reward model made by `segrew train-rm`.")
    extra_reward_models: list[str] = arg([], help="Further reward models, added with their weights.")
    reward_functions: list[str] = arg(
        [],
        help="module:function …, called with prompts, completions and the data's columns (see "
        "policy/reward_functions.py); code: the answers' programs, run on the tests of their problems.",
    )
    reward_weights: list[float] = arg(
        [], help="Of the reward model, the further ones and the functions, in this order; default 1 each."
    )
    reward_tokens: Literal["ids", "text"] = arg(
        "ids", help="Reward models read the policy's token ids, or the answer's text through their own tokenizer."
    )
    eval_reward_models: list[str] = arg([], help="Reward models that judge evaluation answers and are never optimized.")
    eval_reward_functions: list[str] = arg([], help="The same, as module:function.")
    chat_template: str | None = arg(
        None, help="raw, chatml or a .jinja file; needed for a base model without a template."
    )
    system_role: SystemRole = arg("merge", help="Where the template has none: merge it into the first turn, or refuse.")
    critic_init: Literal["sft", "reward_model"] = arg("sft", help="Where the critic's trunk and head start.")
    bf16: bool | None = arg(
        None, help="Compute in bfloat16; default where the processor has it. Trained weights stay float32."
    )
    gradient_checkpointing: bool = arg(False, help="Recompute activations in the backward pass to save memory.")
    use_liger_kernel: bool = arg(False, help="Liger's fused kernels in every model; needs CUDA and segrew[liger].")
    use_peft: bool = arg(
        False,
        help="Train LoRA adapters of policy and critic, which with the reference share one base; an adapter to start "
        "from is trained on.",
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
    n_schedule: str | None = arg(
        None, help="Length of n-gram actions by PPO step, such as 10:0,5:100 (10 from the start, 5 from step 100 on)."
    )
    normalizer: Mode | None = arg(
        None,
        help="Normalize unit rewards by location, by one mean and spread of all units (global) or of last units "
        "(last), or not at all; default as the reward model was calibrated.",
    )
    interpolation: Interpolation = arg("even", help="How a unit's reward is spread over its tokens.")
    reward_clip: float = arg(10.0, help="Bound on a unit's normalized reward, before it is spread.")
    reward_scale: RewardScale = arg(
        "none", help="Divide an answer's rewards by its number of units or of tokens, so that length does not pay."
    )
    missing_eos_penalty: float | None = arg(None, help="Taken once from the last token of a cut-off answer.")
    truncated_answers: Literal["score", "mask", "bootstrap"] = arg(
        "score",
        help="A cut-off answer is scored like any other, left out of the losses, or continued by the critic's value.",
    )
    skip_bad_rows: bool = arg(
        False, help="Leave out and count answers with a missing or non-finite reward, and updates with such gradients."
    )

    # Rollouts
    rollout_batch_size: int = arg(64, help="Answers a step, over all processes.")
    num_samples_per_prompt: int = arg(1, help="Answers to each prompt; rloo and group compare them.")
    max_new_tokens: int = arg(128, help="Longest answer.")
    temperature: float = arg(1.0, help="Of sampling and of every log-probability.")
    top_k: int = arg(0, help="Sample from the k likeliest tokens; 0 for all. Log-probabilities stay those of all.")
    top_p: float = arg(1.0, help="Sample from the likeliest tokens of this joint probability. The same holds.")
    stop_token_ids: list[int] = arg([], help="Stop tokens besides the chat template's.")
    stop_strings: list[str] = arg([], help="Texts that end an answer.")
    local_rollout_forward_batch_size: int = arg(32, help="Answers drawn at once.")
    max_tokens_per_batch: int = arg(
        TOKENS_PER_BATCH, help="Tokens of a pass without gradients, each prompt counted once."
    )

    # PPO
    total_steps: int = arg(100, help="PPO steps: one batch of rollouts each.")
    num_ppo_epochs: int = arg(1, help="Passes over each batch of rollouts.")
    num_mini_batches: int = arg(1, help="Optimizer steps in each pass.")
    per_device_train_batch_size: int = arg(8, help="Most rows of a forward and backward pass.")
    train_tokens_per_batch: int | None = arg(
        None, help="Most tokens of a forward and backward pass, each prompt counted once."
    )
    kl_coef: float = arg(0.05, help="Weight of the KL to the reference, at the start where it adapts.")
    kl_in: KLPlace = arg("reward", help="Subtract the KL from the reward, or add it to the loss.")
    kl_estimator: KLEstimator = arg("k1", help="Estimate of the KL; in the loss k2 or k3.")
    kl_scale: Scale = arg("token", help="A unit pays for the KL of each of its tokens, or for their mean.")
    kl_controller: KLController = arg("fixed", help="adaptive: steer the KL of an answer to --kl_target.")
    kl_target: float = arg(6.0, help="Nats an answer, for the adaptive controller.")
    kl_horizon: int = arg(10000, help="Answers over which the adaptive controller acts.")
    cliprange: float = arg(0.2, help="Clip of the policy ratio.")
    cliprange_high: float | None = arg(None, help="Clip above 1 where it differs (clip-higher).")
    dual_clip: float | None = arg(None, help="Bound on the ratio where the advantage is negative, such as 3.")
    target_kl: float | None = arg(
        None, help="No further update from these rollouts once the KL between old and new policy is above this."
    )
    ratio_threshold: float | None = arg(None, help="The same for the largest ratio.")
    cliprange_value: float | None = arg(0.2, help="Clip of the value update.")
    vf_coef: float = arg(1.0, help="Weight of the value loss.")
    critic_target: Scale = arg(
        "token", help="Regress the value of each token to its unit's return, or the unit's value."
    )
    critic_warmup_steps: int = arg(0, help="PPO steps at the start in which only the critic learns.")
    advantage_estimator: Estimator = arg(
        "gae",
        help="gae (with a critic), or a unit's return less a baseline: rloo, group (also scaled), reinforce (none).",
    )
    gamma: float = arg(1.0, help="Discount.")
    lam: float = arg(0.95, help="Lambda of generalized advantage estimation.")
    gamma_scale: Scale = arg("unit", help="Discount per unit, or per token of a unit.")
    lambda_scale: Scale = arg("unit", help="Lambda per unit, or per token of a unit.")
    value_scheme: ValueScheme = arg("mean", help="Value of a unit from those of its tokens.")
    ratio: Ratio = arg("token", help="Importance ratio per token, or joint or geometric mean over a unit.")
    loss_reduction: Reduction = arg("token", help="Mean of the policy loss over tokens, responses or units.")
    whitening: Whitening = arg("token", help="Standardize advantages over all tokens or all units of a batch, or not.")
    compat: Compat | None = arg(None, help="ma_rlhf_release: units and advantages as MA-RLHF's released code has them.")

    # Optimizer
    learning_rate: float = arg(1e-6, help="Of the policy.")
    critic_learning_rate: float = arg(1e-5, help="Of the critic.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = arg(
        "constant", help="Schedule after the warm-up."
    )
    min_lr_rate: float = arg(0.1, help="Where cosine_with_min_lr ends, as a share of the rate.")
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
    early_stopping_patience: int | None = arg(
        None,
        help="Stop after this many evaluations without a better --metric_for_best_model, and keep the best policy.",
    )
    metric_for_best_model: str = arg("eval/score", help="What early stopping watches, such as eval/score.")
    save_steps: int = arg(50, help="PPO steps between two checkpoints; 0 for none.")
    save_total_limit: int | None = arg(2, help="Newest checkpoints to keep.")
    samples_per_step: int = arg(4, help="Answers a step that go to samples.jsonl with their segments.")
    report_to: str = arg("none", help="tensorboard, wandb or another tracker of accelerate.")

    def __post_init__(self) -> None:
        CodeExecution.__post_init__(self)
        EngineSettings.__post_init__(self)
        check_settings(self)

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_token_ids=tuple(self.stop_token_ids),
            stop_strings=tuple(self.stop_strings),
            batch_size=self.local_rollout_forward_batch_size,
        )
