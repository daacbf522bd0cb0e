"""How the two axes are resolved against a reward model, and what is refused on the way."""

import pytest
import torch

from policy.ppo_config import PPOConfig
from policy.roles import check_same_tokens
from policy.scoring import Axes, take
from reward_models import LocationNormalizer, SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.segmentation import Segmentation, SegmentationConfig


@pytest.fixture
def reward_model(reward_dirs):
    return SegmentRewardModel.from_pretrained(reward_dirs["entropy"], device=torch.device("cpu"))


def config(**changes) -> PPOConfig:
    return PPOConfig(reward_model_path="runs/rm", **changes)


def test_defaults_are_the_reward_models_own_rule_and_token_actions(reward_model):
    axes = Axes.from_config(config(), reward_model)
    assert (axes.rewards.label, axes.actions.label, axes.terminal) == ("entropy>5.2", "token", False)
    assert axes.normalizer is reward_model.normalizer


def test_both_axes_share_the_entropy_threshold(reward_model):
    axes = Axes.from_config(config(action_rule="entropy"), reward_model)
    assert axes.actions == axes.rewards
    axes = Axes.from_config(config(action_rule="entropy", entropy_threshold=1.0, reward_rule="terminal"), reward_model)
    assert axes.actions == SegmentationConfig(rule="entropy", threshold=1.0)
    assert axes.terminal and axes.normalizer is None and axes.rewards == reward_model.segmentation


def test_a_reward_rule_that_leaves_out_the_stop_token_still_lets_it_act(reward_dirs):
    model = SegmentRewardModel.from_pretrained(reward_dirs["released"], device=torch.device("cpu"))
    axes = Axes.from_config(config(action_rule="entropy"), model)
    assert axes.rewards.compat == "dense_rlhf_release" and axes.actions == SegmentationConfig(threshold=5.2)


def test_n_grams_take_their_length_from_the_settings(reward_model):
    assert Axes.from_config(config(action_rule="ngram", n=3), reward_model).actions.label == "ngram-3"


def test_a_setting_that_neither_rule_reads_is_refused(reward_model):
    for wrong, message in [
        ({"n": 3}, "--n 3: rule token does not read it"),
        ({"entropy_threshold": 1.0}, "--entropy_threshold 1.0: rule token does not read it"),
        ({"action_rule": "sentence", "parser": "x"}, "--parser x: rule sentence does not read it"),
        ({"action_rule": "entropy", "n": 3}, "--n 3: the model's own rule does not read it"),
    ]:
        with pytest.raises(ValueError, match=message):
            Axes.from_config(config(**wrong), reward_model)


def test_a_missing_parser_is_refused_before_anything_runs(reward_model):
    with pytest.raises(ValueError, match=r"--parser none: no such|spaCy, which is not installed"):
        Axes.from_config(config(action_rule="constituency", parser="none"), reward_model)


def test_a_normalizer_fitted_for_another_rule_is_refused(reward_model):
    message = r"runs/rm/normalizer.json was calibrated for segmentation entropy>5.2 .* under token .*--reward_rule null"
    with pytest.raises(ValueError, match=message):
        Axes.from_config(config(reward_rule="token"), reward_model)
    with pytest.raises(ValueError, match=r"entropy>5.2 .* read under entropy>1.75"):
        Axes.from_config(config(reward_rule="entropy", entropy_threshold=1.75), reward_model)
    assert Axes.from_config(config(reward_rule="token", normalizer="none"), reward_model).normalizer is None


def test_dense_rewards_without_a_normalizer_are_refused_unless_asked_for(reward_model):
    reward_model.normalizer = None
    with pytest.raises(ValueError, match=r"has no normalizer.json.*segrew calibrate.*--normalizer none"):
        Axes.from_config(config(), reward_model)
    assert Axes.from_config(config(normalizer="none"), reward_model).normalizer is None
    assert Axes.from_config(config(reward_rule="terminal"), reward_model).normalizer is None
    assert Axes.from_config(config(reward_rule="response"), reward_model).normalizer is None
    with pytest.raises(ValueError, match=r"has no normalizer.json, and --normalizer global asks for one"):
        Axes.from_config(config(reward_rule="response", normalizer="global"), reward_model)


def test_an_entropy_rule_needs_a_threshold_from_somewhere(reward_dirs):
    model = SegmentRewardModel.from_pretrained(reward_dirs["response"], device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"needs a threshold.*rule response.*--entropy_threshold"):
        Axes.from_config(config(action_rule="entropy"), model)
    axes = Axes.from_config(config(action_rule="entropy", entropy_threshold=2.0), model)
    assert axes.actions.threshold == 2.0 and axes.rewards.rule == "response"


def test_b13_another_vocabulary_is_refused_by_its_first_token(reward_model, build_tokenizer):
    swapped = ChatFormat.from_tokenizer(build_tokenizer(swapped=("x", "y")))
    ids = build_tokenizer().get_vocab()
    with pytest.raises(ValueError, match=rf"token 'y' has id {ids['x']} in the policy and {ids['y']} in the reward"):
        check_same_tokens(swapped, reward_model, "runs/rm", "policy")


def test_b13_too_few_embedding_rows_are_refused_and_padded_tables_accepted(reward_model, build_tokenizer):
    chat = ChatFormat.from_tokenizer(build_tokenizer())
    reward_model.model.resize_token_embeddings(320)
    check_same_tokens(chat, reward_model, "runs/rm", "policy")
    reward_model.model.resize_token_embeddings(250)
    with pytest.raises(ValueError, match="250 embedding rows"):
        check_same_tokens(chat, reward_model, "runs/rm", "policy")


def test_another_chat_template_is_refused(reward_model, build_tokenizer):
    chat = ChatFormat.from_tokenizer(build_tokenizer(), "raw")
    with pytest.raises(ValueError, match=r"another chat template.*--chat_template runs/rm/chat_template.jinja"):
        check_same_tokens(chat, reward_model, "runs/rm", "policy")


def test_take_cuts_rows_to_their_longest_response():
    segmentation = Segmentation(torch.tensor([[0, 0, 1, 1], [0, 1, -1, -1], [0, -1, -1, -1]]))
    part = take(segmentation, [2, 1], 2)
    assert part.ids.tolist() == [[0, -1], [0, 1]]
    assert part.size == segmentation.size


def test_one_normalizer_is_only_for_its_segmenter(policy_dir, tmp_path, build_reward_model):
    """The fingerprint covers the segmenter: a normalizer carried over from another model is refused."""
    path = build_reward_model(tmp_path / "rm", policy_dir, SegmentationConfig(rule="entropy", threshold=5.2))
    model = SegmentRewardModel.from_pretrained(path, device=torch.device("cpu"))
    foreign = SegmentationConfig(rule="entropy", threshold=5.2).fingerprint(
        segmenter="another", tokenizer=model.chat.fingerprint, read_position="end"
    )
    model.normalizer = LocationNormalizer.from_parameters(0.0, 0.0, 0.0, 1.0, fingerprint=foreign, rule="entropy>5.2")
    with pytest.raises(ValueError, match="segrew calibrate"):
        Axes.from_config(config(), model)


def test_the_normalizer_of_a_run_is_the_calibrated_one_or_another_mode_of_it(reward_model):
    scalar = reward_model.normalizer.from_parameters(0.0, 0.0, 1.0, 2.0)
    reward_model.normalizer.modes["last"] = scalar.modes["location"]
    axes = Axes.from_config(config(normalizer="last"), reward_model)
    assert (axes.normalizer.mode, axes.normalizer.mean(0.5), axes.normalizer.std(0.5)) == ("last", 1.0, 2.0)
    with pytest.raises(ValueError, match="no numbers for the mode 'global'"):
        Axes.from_config(config(normalizer="global"), reward_model)
    reward_model.normalizer = reward_model.normalizer.with_mode("none")
    assert Axes.from_config(config(), reward_model).normalizer is None
    assert Axes.from_config(config(normalizer="location"), reward_model).normalizer.mode == "location"
