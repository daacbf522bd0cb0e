"""The normalizer of a reward model: fitted on its own unit rewards, tied to its rule, and refused elsewhere."""

import shutil

import pytest
import torch
from rich.console import Console

from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.calibrate import CalibrationConfig, calibrate
from reward_models.calibration_report import print_fit
from reward_models.length_bias import length_bias
from segrew.cli import main
from segrew.run_directory import read_json, write_json


@pytest.fixture
def reward_dir(tmp_path, head_dir):
    return shutil.copytree(head_dir, tmp_path / "rm")


@pytest.fixture
def fit(reward_dir, pairs_file):
    def run(**options) -> tuple[LocationNormalizer, str]:
        console = Console(width=200, record=True, quiet=False)
        config = CalibrationConfig(reward_model=str(reward_dir), dataset_name=str(pairs_file), **options)
        return calibrate(config, console), console.export_text()

    return run


def unit_readings(reward_dir, pairs) -> tuple[list[float], list[float]]:
    """Reward and location of every unit of both answers, by scoring them one by one."""
    model = SegmentRewardModel.from_pretrained(reward_dir)
    model.normalizer = None
    segments = [
        s for p in pairs for text in (p.chosen, p.rejected) for s in model.score([p.prompt], [text])[0].segments
    ]
    return [s.reward for s in segments], [s.location for s in segments]


def test_the_fit_is_that_of_the_rewards_read_one_by_one(reward_dir, fit, short_pairs):
    normalizer, said = fit()
    rewards, locations = unit_readings(reward_dir, short_pairs)
    expected = LocationNormalizer().fit(torch.tensor(rewards), torch.tensor(locations))
    for name in ("w_mu", "b_mu", "w_sigma", "b_sigma"):
        assert getattr(normalizer, name) == pytest.approx(getattr(expected, name), abs=1e-3, rel=1e-3)
    assert sum(point.count for point in normalizer.bins) == len(rewards)
    assert f"{len(rewards)} unit rewards of 24 responses" in said and "R²" in said and "residual" in said
    assert (reward_dir / "normalizer.svg").read_text().lstrip().startswith("<?xml")


def test_it_belongs_to_the_reward_model_and_is_applied_by_it(reward_dir, fit, short_pairs):
    normalizer, _ = fit()
    model = SegmentRewardModel.from_pretrained(reward_dir)
    assert model.normalizer.fingerprint == model.fingerprint == normalizer.fingerprint
    (record,) = model.score([short_pairs[0].prompt], [short_pairs[0].chosen])
    for s in record.segments:
        expected = (s.reward - normalizer.mean(s.location)) / normalizer.std(s.location)
        assert s.normalized == pytest.approx(expected, abs=1e-4)


def test_one_of_another_rule_is_refused_until_calibrated_again(reward_dir, fit, pairs_file, tmp_path, capsys):
    fit()
    path = reward_dir / "normalizer.json"
    write_json(path, read_json(path) | {"fingerprint": "0123", "rule": "entropy>9"})
    argv = ["score", "--reward_model", str(reward_dir), "--dataset_name", str(pairs_file), "--max_rows", "2"]
    capsys.readouterr()
    assert main([*argv, "--output_dir", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "was calibrated for segmentation entropy>9" in error and "segrew calibrate" in error
    assert not (tmp_path / "a").exists()
    fit()
    assert main([*argv, "--output_dir", str(tmp_path / "b")]) == 0


def test_a_damaged_normalizer_is_an_error(reward_dir):
    (reward_dir / "normalizer.json").write_text('{"w_mu": 1}')
    with pytest.raises(ValueError, match="lacks w_sigma, b_mu"):
        SegmentRewardModel.from_pretrained(reward_dir)


def test_fewer_pairs_are_drawn_by_the_seed(fit):
    bins = [fit(max_pairs=5, seed=seed)[0].bins for seed in (1, 1, 2)]
    assert bins[0] == bins[1] != bins[2]


def test_what_cannot_be_calibrated_is_refused(tmp_path, pairs_file, head_dir, capsys):
    assert main(["calibrate", "--reward_model", str(tmp_path), "--dataset_name", str(pairs_file)]) == 2
    assert "is no reward-model directory" in capsys.readouterr().err
    before = sorted(p.name for p in head_dir.iterdir())
    assert main(["calibrate", "--reward_model", str(head_dir), "--dataset_name", str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err and sorted(p.name for p in head_dir.iterdir()) == before


def test_estimator_and_mode_are_values_of_one_field_each(reward_dir, fit, short_pairs):
    rewards, locations = (torch.tensor(column) for column in unit_readings(reward_dir, short_pairs))
    normalizer, said = fit(normalizer="global", regression="weighted", link="log", location="token")
    assert (normalizer.mode, normalizer.w_mu, normalizer.w_sigma) == ("global", 0.0, 0.0)
    assert normalizer.mean(1.0) == pytest.approx(rewards.mean().item(), abs=1e-4)
    assert normalizer.std(0.1) == pytest.approx(rewards.std(correction=0).item(), rel=1e-3)
    last = normalizer.with_mode("last")
    assert last.mean(1.0) == pytest.approx(rewards[locations == 1].mean().item(), abs=1e-3)
    assert "In force: global" in said and "exp(" in said and "weighted regression" in said
    loaded = SegmentRewardModel.from_pretrained(reward_dir).normalizer
    assert vars(loaded) == vars(normalizer)
    assert loaded.location_by == "token" and loaded.fitted_range[0] != fit()[0].fitted_range[0]


def test_score_against_length_is_said_and_stored(reward_dir, fit, short_pairs):
    _, said = fit()
    record = read_json(reward_dir / "calibration.json")
    model = SegmentRewardModel.from_pretrained(reward_dir)
    texts = [text for pair in short_pairs for text in (pair.chosen, pair.rejected)]
    scores = [r.score for r in model.score([p.prompt for p in short_pairs for _ in range(2)], texts)]
    lengths = [len(model.chat.response_ids(text)) for text in texts]
    expected = torch.corrcoef(torch.tensor([scores, [float(n) for n in lengths]]))[0, 1].item()
    assert record["length_bias"]["correlation"] == pytest.approx(expected, abs=1e-4)
    assert record["responses"] == record["length_bias"]["n"] == 24 and record["settings"]["regression"] == "huber"
    assert f"Score against length: correlation {expected:+.2f}" in said


def test_the_table_of_many_bins_ends_with_the_last_and_says_what_it_shows():
    locations = torch.arange(1, 401) / 400
    normalizer = LocationNormalizer(rule="entropy>1").fit(locations.cos() + 0.1 * (40 * locations).sin(), locations)
    console = Console(width=200, record=True, quiet=False)
    bins, bias = normalizer.bins, length_bias([1.0], [1], [0])
    print_fit(normalizer, {"units": 400, "responses": 1, "length_bias": bias}, console)
    said = console.export_text()
    shown = [point for point in bins if f"{point.location:.3f} " in said]
    assert len(bins) % (len(bins) // 8) != 1 and shown[-1] is bins[-1]  # one in so many alone would leave it out
    assert f"{len(shown)} of {len(bins)} bins: one in {len(bins) // 8}, and the last" in said
