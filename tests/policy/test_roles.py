"""Who is loaded from where, what trains, and whose entropies cut the segments."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from policy.ppo_config import PPOConfig
from policy.roles import load_roles
from policy.scoring import Axes, cut_units
from segrew.conversations import Conversations, response_statistics
from segrew.language_models import load_causal_lm
from segrew.segmentation import segment

CPU = torch.device("cpu")
CONVERSATIONS = Conversations([[5, 6], [7]], [[9, 40, 41, 90, 2], [8, 77, 12]], torch.tensor([True, False]))


@pytest.fixture
def config(policy_dir, reward_dirs):
    def build(**changes) -> PPOConfig:
        settings = {"model_name_or_path": str(policy_dir), "reward_model_path": str(reward_dirs["entropy"])}
        return PPOConfig(**settings | changes)

    return build


def test_policy_and_critic_train_and_nothing_else_does(config):
    roles = load_roles(config(), CPU)
    assert all(p.requires_grad for module in (roles.policy, roles.critic) for p in module.parameters())
    assert not any(p.requires_grad for p in roles.reference.parameters())
    assert not any(p.requires_grad for p in roles.reward_model.model.parameters())
    pointers = [{p.data_ptr() for p in m.parameters()} for m in (roles.policy, roles.critic, roles.reference)]
    assert not (pointers[0] & pointers[1] or pointers[0] & pointers[2] or pointers[1] & pointers[2])


def test_lora_trains_adapters_and_the_value_head(config):
    roles = load_roles(config(use_peft=True), CPU)
    trained = {name for name, p in roles.policy.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    trained = {name for name, p in roles.critic.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trained and all("lora_" in n or n.startswith("head") for n in trained)
    assert not any(p.requires_grad for p in roles.reference.parameters())


def test_the_critic_starts_where_it_is_told(config, policy_dir):
    sft = load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU)
    roles = load_roles(config(), CPU)
    assert torch.equal(roles.critic.trunk.embed_tokens.weight, sft.model.embed_tokens.weight)
    roles = load_roles(config(critic_init="reward_model"), CPU)
    reward_model = roles.reward_model
    assert torch.equal(roles.critic.trunk.embed_tokens.weight, reward_model.model.model.embed_tokens.weight)
    assert torch.equal(roles.critic.head.weight, reward_model.head.weight)


def test_values_are_of_the_state_that_produced_the_token(config):
    """V_0 sees the prompt only: it must not change with the first response token, V_1 must."""
    critic = load_roles(config(), CPU).critic
    other = Conversations([[5, 6]], [[100, 40, 41]], torch.tensor([False]))
    with torch.no_grad():
        values, changed = critic(CONVERSATIONS), critic(other)
    assert values[0, 0].item() == pytest.approx(changed[0, 0].item(), abs=1e-6)
    assert abs(values[0, 1].item() - changed[0, 1].item()) > 1e-6
    assert not values[1, 3:].any()


def test_no_dropout_is_left_in_training_mode(config):
    roles = load_roles(config(), CPU)
    roles.policy.train()
    with torch.no_grad():
        first, second = (roles.policy(CONVERSATIONS, 1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_segments_are_cut_by_the_segmenter_that_the_reward_model_names(config, policy_dir, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(policy_dir, moved)
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    torch.manual_seed(3)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(moved)
    for path in (policy_dir, moved):
        settings = config(model_name_or_path=str(path), action_rule="entropy")
        roles = load_roles(settings, CPU)
        assert (roles.segmenter is None) == (path == policy_dir)
        axes = Axes.from_config(settings, roles.reward_model)
        units = cut_units(CONVERSATIONS, roles, axes, settings, torch.Generator())
        with torch.no_grad():
            own = load_causal_lm(str(path), dtype=torch.float32, device=CPU)
            named = load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU)
            logprobs, other_entropy = response_statistics(own, CONVERSATIONS)
            _, entropy = response_statistics(named, CONVERSATIONS)
        rule = roles.reward_model.segmentation
        expected = segment(rule, CONVERSATIONS.mask, entropy=entropy, ended=CONVERSATIONS.ended)
        torch.testing.assert_close(units.ref_logprobs, logprobs, atol=1e-5, rtol=0)
        for cut in (units.cuts[rule], units.readings, units.actions):
            assert torch.equal(cut.ids, expected.ids)
    wrong = segment(rule, CONVERSATIONS.mask, entropy=other_entropy, ended=CONVERSATIONS.ended)
    assert not torch.equal(wrong.ids, expected.ids)
