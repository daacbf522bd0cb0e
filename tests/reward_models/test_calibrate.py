"""`segrew calibrate` on a tiny reward model."""

import json
import shutil

import pytest

from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.calibrate import CalibrationConfig, calibrate
from segrew.preferences import load_preferences


@pytest.fixture()
def reward_dir(head_dir, tmp_path):
    return shutil.copytree(head_dir, tmp_path / "rm")


def test_it_fits_the_rewards_that_scoring_gives(reward_dir, pairs_file, capsys):
    calibrate(CalibrationConfig(reward_model=str(reward_dir), dataset_name=str(pairs_file)))
    pairs = load_preferences(str(pairs_file)).pairs
    model = SegmentRewardModel.from_pretrained(reward_dir)
    answers = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    scored = model.score([prompt for prompt, _ in answers], [text for _, text in answers])
    rewards = [segment.reward for response in scored for segment in response.segments]
    locations = [segment.location for response in scored for segment in response.segments]
    import numpy as np

    expected = LocationNormalizer().fit(np.array(rewards), np.array(locations))
    found = json.loads((reward_dir / "normalizer.json").read_text())
    for name in ("w_mu", "w_sigma", "b_mu", "b_sigma"):
        assert found[name] == pytest.approx(getattr(expected, name), abs=1e-3)
    assert found["fingerprint"] == model.fingerprint
    printed = capsys.readouterr().out
    assert "R²" in printed and "residual" in printed and f"{len(rewards)} unit rewards" in printed
    assert "<svg" in (reward_dir / "normalizer.svg").read_text()


def test_scoring_then_gives_normalized_rewards(reward_dir, pairs_file):
    calibrate(CalibrationConfig(reward_model=str(reward_dir), dataset_name=str(pairs_file)))
    model = SegmentRewardModel.from_pretrained(reward_dir)
    (scored,) = model.score([[{"role": "user", "content": "Name a river."}]], ["The Loire flows to the west."])
    for segment in scored.segments:
        usual, spread = model.normalizer.mean(segment.location), model.normalizer.std(segment.location)
        assert segment.normalized == pytest.approx((segment.reward - usual) / spread, abs=1e-4)
