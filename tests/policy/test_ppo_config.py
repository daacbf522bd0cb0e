"""Every setting is read somewhere, every shipped config loads, and bad values are refused by name."""

import ast
import dataclasses
from pathlib import Path

import pytest

from policy import rloo
from policy.ppo_checks import n_by_step, unread_flags
from policy.ppo_config import PPOConfig
from segrew.config import parse

ROOT = Path(__file__).parents[2]


def test_every_field_is_read():
    read = set()
    for file in [*(ROOT / "policy").glob("*.py"), ROOT / "segrew" / "rule_flags.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("config", "self"):
                read.add(node.attr)
    assert {field.name for field in dataclasses.fields(PPOConfig)} - read == set()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("ppo_*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    (config,) = parse("ppo", (PPOConfig,), ["--config", str(path), "--seed", "3"])
    assert config.seed == 3 and config.reward_model_path


# reward rule, action rule, ratio, estimator
CELLS = {
    "bandit": ("response", "token", "token", "gae"),
    "token": ("token", "token", "token", "gae"),
    "sentence": ("sentence", "token", "token", "gae"),
    "segment": ("entropy", "token", "token", "gae"),
    "bandit_as_segment": ("entropy", "token", "token", "gae"),
    "segment_as_bandit": ("terminal", "token", "token", "gae"),
    "macro_ngram": ("terminal", "ngram", "joint", "gae"),
    "macro_random": ("terminal", "random_ngram", "joint", "gae"),
    "macro_perplexity": ("terminal", "perplexity", "joint", "gae"),
    "macro_parsing": ("terminal", "constituency", "joint", "gae"),
    "ma_rlhf_release": ("terminal", "ngram", "token", "gae"),
    "macro_dense": ("entropy", "entropy", "token", "gae"),
    "rloo": ("terminal", "response", "token", "rloo"),
    "group_relative": ("terminal", "response", "token", "group"),
    "reinforce": ("terminal", "response", "token", "reinforce"),
    "paper_phi3": ("entropy", "token", "token", "gae"),
    "paper_llama3": ("entropy", "token", "token", "gae"),
    "paper_gemma_2b": ("terminal", "ngram", "joint", "gae"),
    "paper_gemma_7b": ("terminal", "ngram", "joint", "gae"),
    "paper_codegemma_2b": ("terminal", "ngram", "joint", "gae"),
    "paper_codegemma_7b": ("terminal", "ngram", "joint", "gae"),
}


def shipped(path: Path) -> PPOConfig:
    (config,) = parse("ppo", (PPOConfig,), ["--config", str(path)])
    return config


def test_every_named_method_is_one_cell_of_the_grid():
    cells = {}
    for path in (ROOT / "configs").glob("ppo_*.yaml"):
        c = shipped(path)
        cells[path.stem.removeprefix("ppo_")] = (c.reward_rule, c.action_rule, c.ratio, c.advantage_estimator)
    assert cells == CELLS


def test_the_rloo_command_has_the_settings_of_its_config(monkeypatch):
    seen = []
    monkeypatch.setattr("policy.ppo.train_policy", lambda config, *_: seen.append(config) or Path("x"))
    rloo.main(["--reward_model_path", "runs/reward_model", "--seed", "4", "--num_samples_per_prompt", "2"])
    changes = {"output_dir": "runs/rloo", "seed": 4, "num_samples_per_prompt": 2}
    assert seen == [dataclasses.replace(shipped(ROOT / "configs" / "ppo_rloo.yaml"), **changes)]


# Per paper: batch, rates, KL weight, longest prompt and answer, warm-up, temperature, top-k.
PAPER = {
    "phi3": (1024, 5e-7, 9e-6, 0.01, 1024, 1024, 28, 1.0, 0),
    "llama3": (1024, 5e-7, 9e-6, 0.01, 1024, 1024, 14, 1.0, 0),
    "gemma_2b": (256, 1.5e-5, 1.5e-5, 0.05, 512, 512, 200, 0.8, 50),
    "gemma_7b": (256, 1e-6, 1e-6, 0.05, 512, 512, 200, 0.8, 50),
    "codegemma_2b": (16, 5e-7, 5e-5, 0.05, 600, 512, 20, 1.0, 5),
    "codegemma_7b": (16, 5e-7, 5e-5, 0.05, 600, 512, 20, 1.0, 5),
}


@pytest.mark.parametrize("name", PAPER)
def test_paper_settings(name):
    c = shipped(ROOT / "configs" / f"ppo_paper_{name}.yaml")
    found = (
        c.rollout_batch_size, c.learning_rate, c.critic_learning_rate, c.kl_coef, c.max_prompt_length,
        c.max_new_tokens, c.warmup_steps, c.temperature, c.top_k,
    )  # fmt: skip
    assert found == PAPER[name]


def test_n_follows_its_schedule():
    config = PPOConfig(reward_model_path="x", action_rule="ngram", n_schedule="5:100,10:0")
    assert n_by_step(config) == [(0, 10), (100, 5)]
    assert n_by_step(PPOConfig(reward_model_path="x", n=3)) == [(0, 3)]
    for bad in ("10", "10:5", "0:0", "10:0,5:0", "ten:0"):
        with pytest.raises(ValueError, match="--n_schedule"):
            PPOConfig(reward_model_path="x", action_rule="ngram", n_schedule=bad)
    with pytest.raises(ValueError, match="--action_rule token has no n"):
        PPOConfig(reward_model_path="x", n_schedule="10:0")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"advantage_estimator": "rloo"}, "--advantage_estimator rloo: compares answers to one prompt"),
        ({"rollout_batch_size": 10, "num_samples_per_prompt": 4}, "--rollout_batch_size 10: no multiple"),
        ({"kl_in": "loss"}, "--kl_in loss: k1 has no gradient"),
        ({"advantage_estimator": "reinforce", "critic_warmup_steps": 2}, "has no critic"),
        ({"advantage_estimator": "reinforce", "truncated_answers": "bootstrap"}, "has no critic"),
        ({"compat": "ma_rlhf_release"}, "--compat ma_rlhf_release: .* ngram or response"),
        (
            {"compat": "ma_rlhf_release", "action_rule": "ngram", "ratio": "joint"},
            "--ratio joint: the release has it by",
        ),
        ({"compat": "ma_rlhf_release", "action_rule": "ngram", "whitening": "unit"}, "--whitening unit: the release"),
        ({"reward_weights": [1.0, 2.0]}, "2 weights for 1 sources"),
        ({"critic_init": "reward_model", "reward_tokens": "text"}, "--critic_init reward_model"),
        ({"dual_clip": 0.5}, "--dual_clip 0.5: must be above 1"),
        ({"top_p": 0.0}, "--top_p 0.0"),
        ({"stop_strings": ["a", ""]}, "--stop_strings ''"),
        ({"normalizer": "global", "reward_rule": "terminal"}, "--normalizer global"),
        ({"missing_eos_penalty": 1.0, "truncated_answers": "mask"}, "--missing_eos_penalty 1.0"),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "--kl_coef 0.0: the adaptive"),
        ({"kl_controller": "adaptive", "kl_horizon": 12}, "--kl_horizon 12: too short for --rollout_batch_size 64"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(reward_model_path="x", **settings)


def test_settings_without_effect_are_named_with_what_leaves_them_unread():
    def unread(adapter=False, **changes):
        return unread_flags(PPOConfig(reward_model_path="x", **changes), keeps_adapter=adapter)

    alone = {"advantage_estimator": "rloo", "num_samples_per_prompt": 2}
    (said,) = unread(**alone, vf_coef=0.5, lam=0.9)
    assert said == "--vf_coef, --lam: without effect with --advantage_estimator rloo, which has no critic."
    assert unread(vf_coef=0.5, lam=0.9) == unread(**alone) == []
    assert unread(kl_target=3.0) == ["--kl_target: without effect with --kl_controller fixed."]
    assert unread(kl_target=3.0, kl_controller="adaptive") == []
    assert unread(lora_r=4) == ["--lora_r: without effect with --use_peft false."]
    assert "an adapter to start from" in unread(adapter=True, use_peft=True, lora_r=4)[0]
    assert unread(use_peft=True, lora_r=4, lora_target_modules=["q_proj"]) == []
    assert unread(min_lr_rate=0.2) and not unread(min_lr_rate=0.2, lr_scheduler_type="cosine_with_min_lr")


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0.0),
        ("temperature", -0.5),
        ("max_new_tokens", 0),
        ("rollout_batch_size", 0),
        ("num_mini_batches", 65),
        ("lam", 1.5),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.5),
        ("gamma", -0.1),
        ("cliprange", 0.0),
        ("kl_coef", -0.1),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"--{name} {value}"):
        PPOConfig(reward_model_path="x", **{name: value})


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="action_rule"):
        parse("ppo", (PPOConfig,), ["--reward_model_path", "x", "--action_rule", "paragraph"])


def test_no_reward_model_is_refused():
    with pytest.raises(ValueError, match="--reward_model_path"):
        PPOConfig()
