"""The estimate against counts by hand."""

from policy.memory import estimate_memory
from policy.ppo_config import PPOConfig
from segrew.language_models import load_causal_lm


def config(policy_dir, reward_dirs, **changes) -> PPOConfig:
    return PPOConfig(model_name_or_path=str(policy_dir), reward_model_path=str(reward_dirs["entropy"]), **changes)


def test_weights_are_counted_without_loading_them(policy_dir, reward_dirs):
    weights = sum(p.numel() for p in load_causal_lm(str(policy_dir)).parameters())
    full = estimate_memory(config(policy_dir, reward_dirs))
    assert full["policy"] == full["critic"] == full["reference"] == 4 * weights
    assert full["gradients and AdamW"] == 2 * 3 * 4 * weights


def test_lora_needs_no_reference_and_trains_only_adapters(policy_dir, reward_dirs):
    lora = estimate_memory(config(policy_dir, reward_dirs, use_peft=True, lora_r=2))
    # Per layer: q 32→32, k and v 32→16, o 32→32, gate and up 32→64, down 64→32; rank 2; two layers.
    adapter = 2 * 2 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert "reference" not in lora and lora["critic"] == 0
    assert lora["gradients and AdamW"] == 2 * 3 * 4 * adapter


def test_activations_shrink_with_checkpointing_and_grow_with_the_micro_batch(policy_dir, reward_dirs):
    sizes = [
        estimate_memory(config(policy_dir, reward_dirs, **changes))["activations, at most"]
        for changes in (
            {"per_device_train_batch_size": 4, "gradient_checkpointing": True},
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 8},
        )
    ]
    assert sizes[0] < sizes[1] and sizes[2] == 2 * sizes[1]


def test_without_a_critic_its_share_is_gone_and_every_reward_model_counts(policy_dir, reward_dirs):
    one = estimate_memory(config(policy_dir, reward_dirs))
    both = estimate_memory(
        config(
            policy_dir, reward_dirs, advantage_estimator="rloo", num_samples_per_prompt=2,
            extra_reward_models=[str(reward_dirs["token"])],
        )
    )  # fmt: skip
    assert "critic" not in both and 2 * both["gradients and AdamW"] == one["gradients and AdamW"]
    size = (reward_dirs["token"] / "model.safetensors").stat().st_size
    assert both["reward models"] == one["reward models"] + size
    alone = PPOConfig(model_name_or_path=str(policy_dir), reward_functions=["f:g"])
    assert estimate_memory(alone)["reward models"] == 0
