"""Several reward models in one run: each is read by its own segmenter, or is refused."""

import shutil

import pytest
import torch

from policy.ppo_config import PPOConfig
from policy.readings import Answered
from policy.reward_sources import load_sources
from policy.roles import load_roles
from policy.scoring import Axes, cut_units
from segrew.config import parse
from segrew.conversations import Conversations
from segrew.language_models import load_causal_lm
from segrew.prompts import Prompt
from segrew.segmentation import SegmentationConfig

CPU = torch.device("cpu")
RULE = SegmentationConfig(rule="entropy", threshold=5.2)


@pytest.fixture(scope="module")
def foreign_dir(policy_dir, build_reward_model, tmp_path_factory):
    """A reward model of the same rule and threshold, trained from another policy of the same tokenizer."""
    base, path = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("foreign")
    shutil.copytree(policy_dir, base, dirs_exist_ok=True)
    model = load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(7, 1))
    model.save_pretrained(base)
    return build_reward_model(path, base, RULE)


def build(policy_dir, first, extra, **changes):
    config = PPOConfig(
        model_name_or_path=str(policy_dir), reward_model_path=str(first), extra_reward_models=[str(extra)], **changes
    )
    roles = load_roles(config, CPU)
    axes = Axes.from_config(config, roles.reward_model)
    return config, roles, axes, load_sources(config, roles, axes)


def test_a_further_reward_model_scores_by_the_cuts_of_its_own_segmenter(policy_dir, reward_dirs, foreign_dir):
    config, roles, axes, sources = build(policy_dir, reward_dirs["entropy"], foreign_dir, reward_rule="terminal")
    texts = ["Hello there, you.", "The Rhine, I think."]
    prompts = [Prompt([{"role": "user", "content": f"Question {i}?"}]) for i in range(2)]
    rows = Conversations(
        [roles.chat.prompt_ids(p.messages) for p in prompts],
        [roles.chat.response_ids(text) for text in texts],
        torch.tensor([True, True]),
    )
    units = cut_units(rows, roles, axes, config, torch.Generator())
    own, _ = sources[1].model.segment_and_read(rows)
    assert own.ids.tolist() != units.cuts[RULE].ids.tolist()
    alone = sources[1].model.score([p.messages for p in prompts], texts)
    found = sources[1].read(Answered(prompts, rows, texts), units).scores
    assert found.tolist() == pytest.approx([record.score for record in alone], abs=1e-5)


def test_a_normalizer_of_another_segmenter_than_the_runs_is_refused(policy_dir, reward_dirs, foreign_dir):
    with pytest.raises(ValueError, match=r"read under entropy>5\.2 of the first reward model's segmenter"):
        build(policy_dir, reward_dirs["entropy"], foreign_dir)
    for remedy in ({"normalizer": "none"}, {"reward_tokens": "text"}, {"reward_rule": "terminal"}):
        build(policy_dir, reward_dirs["entropy"], foreign_dir, **remedy)
    same = build(policy_dir, reward_dirs["entropy"], reward_dirs["entropy"])[3]
    assert same[1].normalizer is not None and not same[1].own_segmenter


def test_a_further_model_of_another_rule_is_refused_with_what_helps(policy_dir, reward_dirs):
    with pytest.raises(
        ValueError, match=r"sentence but .* under entropy>5\.2 .*--reward_tokens text .*terminal.*none"
    ) as e:
        build(policy_dir, reward_dirs["entropy"], reward_dirs["sentence"])
    assert "calibrate`" not in str(e.value)  # under its own rule, which is not the run's
    for remedy in ({"normalizer": "none"}, {"reward_tokens": "text"}, {"reward_rule": "terminal"}):
        build(policy_dir, reward_dirs["entropy"], reward_dirs["sentence"], **remedy)


def test_a_rule_of_the_command_line_or_a_file_is_undone_by_null(policy_dir, reward_dirs, tmp_path):
    (tmp_path / "ppo.yaml").write_text("reward_rule: sentence\n")
    flags = ["--config", str(tmp_path / "ppo.yaml"), "--reward_model_path", str(reward_dirs["entropy"])]
    with pytest.raises(ValueError, match="--reward_rule null"):
        axes_of(policy_dir, flags)
    assert axes_of(policy_dir, [*flags, "--reward_rule", "null"]).rewards == RULE


def axes_of(policy_dir, flags):
    (config,) = parse("ppo", (PPOConfig,), [*flags, "--model_name_or_path", str(policy_dir)])
    return Axes.from_config(config, load_roles(config, CPU).reward_model)
