"""The papers' settings on tiny models of the papers' families: they fit together and take a step."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from policy.ppo import train_policy
from policy.ppo_config import PPOConfig
from segrew.config import parse
from segrew.segmentation import SegmentationConfig

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = {"phi3": "phi3", "llama3": "llama", "gemma_2b": "gemma", "codegemma_2b": "gemma"}
SIZES = {
    "vocab_size": 259, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_paper_settings_take_a_step_on_a_tiny_model_of_the_family(
    name, tmp_path, prompts_file, build_tokenizer, build_reward_model
):
    torch.manual_seed(0)
    policy = tmp_path / "policy"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(FAMILIES[name], **SIZES)).save_pretrained(policy)
    build_tokenizer().save_pretrained(policy)
    reward_model = build_reward_model(tmp_path / "rm", policy, SegmentationConfig(rule="entropy", threshold=2.0))
    (config,) = parse("ppo", (PPOConfig,), ["--config", str(CONFIGS / f"ppo_paper_{name}.yaml")])
    init = "sft"  # the reward model here is a Llama, whatever the family
    small = dataclasses.replace(
        config, model_name_or_path=str(policy), reward_model_path=str(reward_model), dataset_name=str(prompts_file),
        output_dir=str(tmp_path / "run"), total_steps=1, rollout_batch_size=4, num_mini_batches=2, max_new_tokens=6,
        critic_init=init, save_steps=0, bf16=False, stop_token_ids=[],
    )  # fmt: skip
    (line,) = (train_policy(small) / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["kl/k2"] == 0.0 and row["policy/updates"] == 2
    assert row["reward/dense_sum"] != 0.0
