"""Every setting is read somewhere, every shipped config loads, and bad values are refused by name."""

import ast
import dataclasses
from pathlib import Path

import pytest

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


def test_the_shipped_configs_are_five_cells_of_the_grid():
    cells = {}
    for path in (ROOT / "configs").glob("ppo_*.yaml"):
        (config,) = parse("ppo", (PPOConfig,), ["--config", str(path)])
        cells[path.stem] = (config.reward_rule, config.action_rule)
    assert cells == {
        "ppo_bandit": ("response", "token"),
        "ppo_token": ("token", "token"),
        "ppo_segment": ("entropy", "token"),
        "ppo_macro_ngram": ("terminal", "ngram"),
        "ppo_macro_dense": ("entropy", "entropy"),
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0.0),
        ("temperature", -0.5),
        ("max_new_tokens", 0),
        ("rollout_batch_size", 0),
        ("num_mini_batches", 65),
        ("lam", 1.5),
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
