"""What a PPO run refuses before anything is loaded."""

from typing import TYPE_CHECKING

from segrew.config import given
from segrew.liger import check_liger_kernel

if TYPE_CHECKING:
    from policy.ppo_config import PPOConfig

AT_LEAST_ONE = (
    "rollout_batch_size", "num_samples_per_prompt", "per_device_train_batch_size", "local_rollout_forward_batch_size",
    "max_tokens_per_batch", "num_ppo_epochs", "num_mini_batches", "max_prompt_length", "eval_steps", "eval_samples",
    "lora_r", "kl_horizon", "early_stopping_patience", "train_tokens_per_batch",
)  # fmt: skip
NOT_NEGATIVE = (
    "total_steps", "kl_coef", "save_steps", "warmup_steps", "samples_per_step", "vf_coef", "critic_warmup_steps",
)  # fmt: skip
POSITIVE = (
    "cliprange", "cliprange_high", "cliprange_value", "reward_clip", "max_grad_norm", "kl_target", "target_kl",
)  # fmt: skip

# What one value of another setting alone reads.
OF_CRITIC = (
    "vf_coef", "lam", "lambda_scale", "value_scheme", "critic_learning_rate", "critic_target", "critic_init",
    "cliprange_value",
)  # fmt: skip
OF_LORA, OF_ADAPTIVE, OF_COSINE = (
    ("lora_r", "lora_alpha", "lora_target_modules"),
    ("kl_target", "kl_horizon"),
    ("min_lr_rate",),
)


def unread_flags(config: "PPOConfig", *, keeps_adapter: bool) -> list[str]:
    """Say which settings were given and have no effect.

    Args:
        keeps_adapter: the adapter to start from is trained on.
    """
    estimator, schedule = config.advantage_estimator, config.lr_scheduler_type
    reasons = [
        (estimator != "gae", f"--advantage_estimator {estimator}, which has no critic", OF_CRITIC),
        (config.kl_controller == "fixed", "--kl_controller fixed", OF_ADAPTIVE),
        (not config.use_peft, "--use_peft false", OF_LORA),
        (keeps_adapter, "an adapter to start from, which keeps its own", OF_LORA),
        (schedule != "cosine_with_min_lr", f"--lr_scheduler_type {schedule}", OF_COSINE),
    ]
    found = [(given(names, config), why) for applies, why, names in reasons if applies]
    return [f"{', '.join(f'--{name}' for name in names)}: without effect with {why}." for names, why in found if names]


def check_settings(config: "PPOConfig") -> None:
    """Refuse values out of range, and settings that contradict each other.

    Raises:
        ValueError: naming the flag.
    """
    if "code" in config.reward_functions + config.eval_reward_functions and not config.allow_code_execution:
        raise ValueError(
            "--reward_functions code: runs the programs that the policy writes; --allow_code_execution true permits "
            "it, in a sandbox."
        )
    if not (config.reward_model_path or config.reward_functions):
        raise ValueError(
            "--reward_model_path is missing: name a directory made by `segrew train-rm`, or give --reward_functions."
        )
    if config.use_liger_kernel:
        check_liger_kernel()
    _ = config.sampling, config.rule_named(config.action_rule)  # refuse their own bad values
    _check_ranges(config)
    _check_batches(config)
    _check_rewards(config)
    _check_kl(config)
    _check_estimator(config)
    n_by_step(config)


def _refuse(config: "PPOConfig", name: str, reason: str) -> None:
    raise ValueError(f"--{name} {getattr(config, name)}: {reason}")


def _check_ranges(config: "PPOConfig") -> None:
    def given(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(config, name) is not None]

    for name in given(AT_LEAST_ONE):
        if getattr(config, name) < 1:
            _refuse(config, name, "must be at least 1.")
    for name in given(NOT_NEGATIVE):
        if getattr(config, name) < 0:
            _refuse(config, name, "must not be negative.")
    for name in given(POSITIVE):
        if getattr(config, name) <= 0:
            _refuse(config, name, "must be positive.")
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name) <= 1:
            _refuse(config, name, "must lie between 0 and 1.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(config, name, "must be at least 0 and below 1.")
    for name in given(("dual_clip", "ratio_threshold")):
        if getattr(config, name) <= 1:
            _refuse(config, name, "must be above 1, the ratio of an unchanged policy.")


def _check_batches(config: "PPOConfig") -> None:
    if config.num_mini_batches > config.rollout_batch_size:
        _refuse(
            config, "num_mini_batches", f"more parts than --rollout_batch_size {config.rollout_batch_size} has answers."
        )
    if config.rollout_batch_size % config.num_samples_per_prompt:
        _refuse(
            config, "rollout_batch_size", f"no multiple of --num_samples_per_prompt {config.num_samples_per_prompt}."
        )


def _check_rewards(config: "PPOConfig") -> None:
    if config.extra_reward_models and not config.reward_model_path:
        _refuse(config, "extra_reward_models", "the first reward model goes to --reward_model_path.")
    sources = bool(config.reward_model_path) + len(config.extra_reward_models) + len(config.reward_functions)
    if config.reward_weights and len(config.reward_weights) != sources:
        _refuse(config, "reward_weights", f"{len(config.reward_weights)} weights for {sources} sources of reward.")
    if config.normalizer not in (None, "none") and (not config.reward_model_path or config.reward_rule == "terminal"):
        _refuse(config, "normalizer", "standardizes a reward model's unit rewards; a terminal score is paid as it is.")
    if config.missing_eos_penalty and config.truncated_answers == "mask":
        _refuse(config, "missing_eos_penalty", "with --truncated_answers mask no cut-off answer is left to pay it.")
    if not config.reward_model_path and config.reward_rule == "terminal":
        _refuse(
            config, "reward_rule", "takes a reward model's score, and there is none; leave the flag out: a function "
            "that returns one number an answer is paid at its end."
        )  # fmt: skip
    for name in ("eval_reward_models", "eval_reward_functions", "early_stopping_patience"):
        if getattr(config, name) and config.eval_dataset is None:
            _refuse(config, name, "needs held-out prompts; name them with --eval_dataset.")
    if config.critic_init == "reward_model" and not (config.reward_model_path and config.reward_tokens == "ids"):
        _refuse(config, "critic_init", "needs a reward model that reads the policy's own ids.")


def _check_kl(config: "PPOConfig") -> None:
    if config.kl_in == "loss" and config.kl_estimator == "k1":
        _refuse(config, "kl_in", "k1 has no gradient in expectation there; add --kl_estimator k2 (or k3).")
    if config.kl_controller == "adaptive":
        if config.kl_coef == 0:
            _refuse(config, "kl_coef", "the adaptive controller multiplies it, so it would stay 0; give it a start.")
        if config.rollout_batch_size >= 5 * config.kl_horizon:  # a step may take off a fifth of answers / horizon
            _refuse(
                config, "kl_horizon", f"too short for --rollout_batch_size {config.rollout_batch_size}: one step could "
                "turn the KL's weight negative."
            )  # fmt: skip


def _check_estimator(config: "PPOConfig") -> None:
    name = config.advantage_estimator
    if name in ("rloo", "group") and config.num_samples_per_prompt < 2:
        _refuse(
            config, "advantage_estimator", "compares answers to one prompt; set --num_samples_per_prompt to 2 or more."
        )
    if name != "gae":
        if config.truncated_answers == "bootstrap":
            _refuse(config, "truncated_answers", f"takes the critic's value, and the estimator {name} has no critic.")
        if config.critic_warmup_steps:
            _refuse(config, "critic_warmup_steps", f"the estimator {name} has no critic.")
    if config.compat is not None:
        if config.action_rule not in ("ngram", "response"):
            _refuse(
                config, "compat", "the release's other terminations do not run as published; take ngram or response."
            )
        if (
            name != "gae"
            or config.truncated_answers == "bootstrap"
            or {config.gamma_scale, config.lambda_scale} != {"unit"}
        ):
            _refuse(config, "compat", "the release has gae with one gamma and one lambda a unit, and no bootstrap.")
        # Over these units the release's last one, a single token, would be lost.
        for field in ("ratio", "critic_target", "loss_reduction", "whitening", "kl_scale"):
            if getattr(config, field) not in ("token", "sequence", "none"):
                _refuse(
                    config, field, f"the release has it by token; set --{field} token with --compat {config.compat}."
                )
        if config.value_scheme != "mean":
            _refuse(config, "compat", "of the release's value functions only the mean runs; set --value_scheme mean.")


def n_by_step(config: "PPOConfig") -> list[tuple[int, int | None]]:
    """The schedule of --n_schedule as (first step, n), by step; the run's --n where there is none.

    Raises:
        ValueError: it is not of the form n:step,n:step with a part for step 0, or the action rule has no n.
    """
    if config.n_schedule is None:
        return [(0, config.n)]
    try:
        pairs = [part.split(":") for part in config.n_schedule.split(",")]
        parts = sorted((int(step), int(n)) for n, step in pairs)
    except ValueError:
        parts = []
    if not parts or parts[0][0] != 0 or any(n < 1 for _, n in parts) or len({step for step, _ in parts}) < len(parts):
        _refuse(config, "n_schedule", "expected n:step,n:step with one part for step 0, such as 10:0,5:100.")
    if config.action_rule != "ngram":
        _refuse(config, "n_schedule", f"--action_rule {config.action_rule} has no n; set --action_rule ngram.")
    return [*parts]
