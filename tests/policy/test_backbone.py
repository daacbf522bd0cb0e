"""One base under four roles gives the numbers of four separate models, and holds its weights once."""

import copy
import json
from collections import Counter

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import policy.backbone as backbone
import policy.roles as roles_module
from policy.ppo import train_policy
from policy.ppo_config import PPOConfig
from policy.ppo_run import open_run
from policy.readings import Answered
from policy.reward_sources import ModelReward
from policy.roles import Critic, load_roles
from policy.scoring import Axes, cut_units
from reward_models import SegmentRewardModel
from reward_models.card import RewardModelCard
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, response_statistics
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint, trunk_of
from segrew.prompts import Prompt
from segrew.segmentation import SegmentationConfig, segment

CPU = torch.device("cpu")
CONVERSATIONS = Conversations(
    [[5, 6], [7], [5, 6]], [[9, 40, 41, 90, 2], [8, 77, 12], [3, 3]], torch.tensor([True, False, False])
)
RULE = SegmentationConfig(rule="entropy", threshold=5.2)


def moved(model, seed: int):
    """Random adapters in place of those that start at zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def sft_adapter(policy_dir, tmp_path_factory):
    """A LoRA adapter on the policy, as supervised fine-tuning leaves it."""
    path = tmp_path_factory.mktemp("sft_adapter")
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    moved(get_peft_model(AutoModelForCausalLM.from_pretrained(policy_dir), lora), 4).save_pretrained(path)
    return path


def save_reward_model(path, model, policy, *, frozen: bool):
    """A reward model around `model`, cut by the entropies of `policy`."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(policy)))
    segmenter = model_fingerprint(load_causal_lm(str(policy), dtype=torch.float32))
    card = RewardModelCard(RULE, str(policy), segmenter, chat.fingerprint, trunk_is_segmenter=frozen)
    SegmentRewardModel(model, chat, card).save_pretrained(path, merge=False)
    return path


@pytest.fixture(scope="module")
def lora_rm(policy_dir, tmp_path_factory):
    """A reward model trained with LoRA on the policy's base and not merged."""
    torch.manual_seed(6)
    model = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1)
    heads = ["score"]
    lora = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules="all-linear", exclude_modules=heads, modules_to_save=heads
    )
    path = tmp_path_factory.mktemp("lora_rm")
    return save_reward_model(path, moved(get_peft_model(model, lora), 7), policy_dir, frozen=False)


@pytest.fixture(scope="module")
def frozen_rm(policy_dir, tmp_path_factory):
    """A head on the policy's own frozen trunk."""
    torch.manual_seed(8)
    model = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1)
    return save_reward_model(tmp_path_factory.mktemp("frozen_rm"), model, policy_dir, frozen=True)


def config_of(model, reward_model, **changes) -> PPOConfig:
    paths = {"model_name_or_path": str(model), "reward_model_path": str(reward_model)}
    return PPOConfig(**paths | {"use_peft": True, "lora_r": 2, "normalizer": "none"} | changes)


def weights_held(models) -> Counter:
    """Number of roles that hold each weight, by its storage."""
    return Counter(pointer for model in models for pointer in {p.data_ptr() for p in model.parameters()})


@pytest.fixture
def trunk_runs(monkeypatch):
    """Count the passes of every trunk, by the name of who asks."""
    runs = Counter()

    def watch(name, model):
        trunk_of(model).register_forward_hook(lambda *_: runs.update([name]))

    return runs, watch


@torch.no_grad()
@pytest.mark.parametrize("from_adapter", [False, True])
def test_four_roles_on_one_base_give_the_numbers_of_four_models(policy_dir, sft_adapter, lora_rm, from_adapter):
    """Every adapter is moved first, so that each role differs from each other one."""
    start = sft_adapter if from_adapter else policy_dir
    config = config_of(start, lora_rm)
    roles = load_roles(config, CPU)
    for seed, model in ((11, roles.policy), (12, roles.critic)):
        moved(model, seed)
    base = load_file(policy_dir / "model.safetensors")
    separate = load_causal_lm(str(start), dtype=torch.float32, device=CPU)  # merged: the start as a model of its own

    def close(found, expected):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    expected = response_statistics(separate, CONVERSATIONS, temperature=0.7)
    found = roles.reference_pass(CONVERSATIONS, temperatures=[0.7], max_tokens=9)
    close(found.logprobs[0], expected[0])
    close(found.entropy, expected[1])

    alone = copy.deepcopy(roles.policy.model).merge_and_unload()
    close(roles.policy(CONVERSATIONS, temperature=1.0)[0], response_statistics(alone, CONVERSATIONS)[0])
    assert (response_statistics(alone, CONVERSATIONS)[0] - expected[0]).abs().max() > 1e-2

    alone = copy.deepcopy(roles.critic)
    layers = [module for module in alone.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.merge()
    assert layers
    close(roles.critic(CONVERSATIONS), alone(CONVERSATIONS))
    unmoved = Critic(trunk_of(separate))
    unmoved.head = roles.critic.head
    assert (roles.critic(CONVERSATIONS) - unmoved(CONVERSATIONS)).abs().max() > 1e-2

    units = segment(RULE, CONVERSATIONS.mask, entropy=expected[1], ended=CONVERSATIONS.ended)
    own = SegmentRewardModel.from_pretrained(lora_rm, device=CPU)
    close(roles.reward_model.read(CONVERSATIONS, units).rewards, own.read(CONVERSATIONS, units).rewards)

    held, everyone = (
        weights_held([*roles.models().values(), roles.reward_model.model]),
        5 if from_adapter else 4,
    )  # with the segmenter, the bare base
    for name, weight in trunk_of(roles.policy.model).named_parameters():
        assert held[weight.data_ptr()] == (1 if "lora_" in name else everyone), name
    frozen = trunk_of(roles.reference).state_dict()
    for name, weight in base.items():
        if name.startswith("model."):
            plain = name.removeprefix("model.")
            here = frozen.get(plain, frozen.get(plain.replace("_proj.", "_proj.base_layer.")))
            assert torch.equal(here, weight), name


@pytest.mark.parametrize("reward", ["lora_rm", "frozen_rm"])
@pytest.mark.parametrize("critic_init", ["sft", "reward_model"])
def test_training_on_one_base_is_training_of_separate_models(
    request, sft_adapter, policy_dir, prompts_file, monkeypatch, tmp_path, reward, critic_init
):
    """The same run with a base for each role, and each reward model in a pass of its own."""
    start = sft_adapter if reward == "lora_rm" else policy_dir
    changes = {
        "dataset_name": str(prompts_file), "total_steps": 2, "rollout_batch_size": 4, "max_new_tokens": 8,
        "learning_rate": 1e-2, "critic_learning_rate": 1e-2, "save_steps": 0, "bf16": False, "critic_init": critic_init,
    }  # fmt: skip
    rows = []
    for name in ("shared", "separate"):
        if name == "separate":
            monkeypatch.setattr(backbone, "view_of", copy.deepcopy)
            monkeypatch.setattr(roles_module, "view_of", copy.deepcopy)
            monkeypatch.setattr(roles_module, "hold_once", lambda *_: None)
            monkeypatch.setattr(roles_module.Roles, "read_along", lambda *_: None)
        path = train_policy(
            config_of(start, request.getfixturevalue(reward), **changes, output_dir=str(tmp_path / name))
        )
        lines = (path / "metrics.jsonl").read_text().splitlines()
        kept = [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time", "tok", "mem"))} for line in lines
        ]
        rows.append((kept, load_file(path / "model.safetensors")))
        weights = json.loads((path / "settings.json").read_text())["weights"]
        if name == "shared":
            assert sum(row["bytes"] for row in weights) < 0.6 * before(weights)
        else:
            assert all(row["shared"] == 0 for row in weights)
    (one, one_weights), (four, four_weights) = rows
    for a, b in zip(one, four, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    for name, weight in one_weights.items():
        torch.testing.assert_close(weight, four_weights[name], atol=1e-5, rtol=1e-4)
    assert one[1]["kl/k2"] > 0


def before(weights: list[dict]) -> int:
    """Bytes if every role held all of its weights itself."""
    return 4 * sum(row["parameters"] for row in weights)


def test_a_head_on_the_reference_is_read_in_its_pass(policy_dir, frozen_rm, trunk_runs):
    config = config_of(policy_dir, frozen_rm, use_peft=False)
    roles = load_roles(config, CPU)
    axes, model = Axes.from_config(config, roles.reward_model), roles.reward_model
    source = ModelReward(str(frozen_rm), model, False, None, 8192)
    roles.read_along(source.name, model)
    runs, watch = trunk_runs
    watch("reference", roles.reference)
    watch("reward model", model.model)
    units = cut_units(CONVERSATIONS, roles, axes, config, torch.Generator())
    found = source.read(Answered([Prompt([])] * 3, CONVERSATIONS, [""] * 3), units)
    assert runs == {"reference": 1}
    expected = SegmentRewardModel.from_pretrained(frozen_rm, device=CPU).read(CONVERSATIONS, units.readings)
    torch.testing.assert_close(found.raw, expected.rewards, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    assert found.raw.abs().min(1).values.max() > 0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reward_model_runs_once_for_its_own_units_and_the_runs(policy_dir, lora_rm, trunk_runs, terminal):
    """Temperature and perplexity units ask the reference for two sets of log-probabilities, which are one pass too."""
    config = config_of(policy_dir, lora_rm, reward_rule="token", action_rule="perplexity", temperature=0.7)
    roles = load_roles(config, CPU)
    axes, model = Axes.from_config(config, roles.reward_model), roles.reward_model
    runs, watch = trunk_runs
    watch("reference", roles.reference)
    watch("reward model", model.model)
    units = cut_units(CONVERSATIONS, roles, axes, config, torch.Generator())
    answered = Answered([Prompt([])] * 3, CONVERSATIONS, [""] * 3)
    found = ModelReward(str(lora_rm), model, terminal, None, 8192).read(answered, units)
    assert runs == {"reference": 1, "reward model": 1}
    expected = model.read(CONVERSATIONS, units.cuts[model.segmentation])
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    with torch.no_grad():
        logprobs, _ = response_statistics(roles.reference, CONVERSATIONS)
    expected_units = segment(axes.actions, CONVERSATIONS.mask, logprobs=logprobs, ended=CONVERSATIONS.ended)
    assert torch.equal(units.actions.ids, expected_units.ids)


def test_values_after_an_answer_cost_no_pass_of_their_own(policy_dir, lora_rm, trunk_runs):
    critic = load_roles(config_of(policy_dir, lora_rm, use_peft=False), CPU).critic
    runs, watch = trunk_runs
    watch("critic", critic.trunk)
    with torch.no_grad():
        values, after = critic.with_after(CONVERSATIONS)
        assert runs == {"critic": 1}
        torch.testing.assert_close(values, critic(CONVERSATIONS))
        for row, (prompt, response) in enumerate(zip(CONVERSATIONS.prompts, CONVERSATIONS.responses, strict=True)):
            states = critic.trunk(torch.tensor([prompt + response])).last_hidden_state
            torch.testing.assert_close(after[row], critic.head(states[0, -1]), atol=1e-5, rtol=0)


def test_a_rank_that_the_adapter_to_start_from_does_not_have_is_told(sft_adapter, frozen_rm, tmp_path):
    nowhere = {"output_dir": str(tmp_path / "run"), "dataset_name": str(tmp_path / "none.jsonl")}
    with pytest.warns(UserWarning, match="--lora_r: without effect with an adapter"), pytest.raises(ValueError):
        open_run(config_of(sft_adapter, frozen_rm, lora_r=8, **nowhere))


def test_an_adapter_goes_on_learning_and_its_start_stays(policy_dir, sft_adapter, frozen_rm):
    """The reference is the policy's start, not the bare base; without LoRA the adapter becomes part of the weights."""
    roles = load_roles(config_of(sft_adapter, frozen_rm), CPU)
    assert {p.shape[0] for n, p in roles.policy.named_parameters() if "lora_A" in n} == {3}  # the adapter's own rank
    trained = {name for name, p in roles.policy.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert roles.segmenter is not None and not roles.readers  # the reward model was cut by the bare base
    assert roles.segmenter.lm_head.weight is roles.reference.get_base_model().lm_head.weight
    with torch.no_grad():
        start = roles.reference_pass(CONVERSATIONS, temperatures=[1.0], max_tokens=99).logprobs[0]
        assert torch.equal(roles.policy(CONVERSATIONS, temperature=1.0)[0], start)
        bare = response_statistics(load_causal_lm(str(policy_dir), dtype=torch.float32), CONVERSATIONS)[0]
        assert (start - bare).abs().max() > 1e-2
        moved(roles.policy, 1)
        assert torch.equal(roles.reference_pass(CONVERSATIONS, temperatures=[1.0], max_tokens=99).logprobs[0], start)
        assert not torch.equal(roles.policy(CONVERSATIONS, temperature=1.0)[0], start)
    full = load_roles(config_of(sft_adapter, frozen_rm, use_peft=False), CPU)
    assert not any("lora_" in name for model in full.models().values() for name, _ in model.named_parameters())


def test_what_cannot_go_on_is_merged(policy_dir, frozen_rm, tmp_path):
    """An adapter that changes the head is no adapter below it: the start is a model of its own, with a new adapter."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = moved(get_peft_model(AutoModelForCausalLM.from_pretrained(policy_dir), lora), 4)
    model.save_pretrained(tmp_path)
    roles = load_roles(config_of(tmp_path, frozen_rm), CPU)
    assert not isinstance(roles.reference, PeftModel)
    with torch.no_grad():
        expected = response_statistics(load_causal_lm(str(tmp_path), dtype=torch.float32), CONVERSATIONS)[0]
        found = roles.reference_pass(CONVERSATIONS, temperatures=[1.0], max_tokens=99).logprobs[0]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(roles.policy(CONVERSATIONS, temperature=1.0)[0], expected)
