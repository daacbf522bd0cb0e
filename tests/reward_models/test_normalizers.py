import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import HuberRegressor

from reward_models import LocationNormalizer
from reward_models.location_fit import bin_locations, fit_location_curves, robust_line, weighted_line
from reward_models.normalizer_presets import PRESETS
from segrew.segmentation import Segmentation

# Published parameters in the order (w_mu, w_sigma, b_mu, b_sigma), with the spread they give.
PHI = (0.7668, 0.2569, 0.4705, 2.8339)
LLAMA3_SFT_TOKEN = (1.7340, 0.9906, 1.3212, 5.4513)
PUBLISHED_STD = [
    (PHI, (2.83, 2.24, 1.65, 1.05)),
    ((0.7209, 0.2330, 0.6055, 2.6555), (2.66, 2.12, 1.58, 1.04)),
    ((0.9628, 0.3796, 1.2917, 3.5006), (3.50, 2.63, 1.75, 0.87)),
    ((0.8345, 0.4780, 0.8798, 3.7358), (3.74, 2.64, 1.54, 0.42)),
    ((1.6268, 0.6254, 0.6419, 4.9217), (4.92, 3.48, 2.04, 0.59)),
]


def published(parameters, **kwargs):
    return LocationNormalizer.from_parameters(*parameters, **kwargs)


def units(lengths):
    """Locations of all units of responses with the given numbers of units."""
    return np.concatenate([np.arange(1, length + 1) / length for length in lengths])


def exact_rewards(parameters, lengths, repeats, seed=0):
    """Rewards whose mean and population spread at every location obey the two lines exactly."""
    w_mu, w_sigma, b_mu, b_sigma = parameters
    places = units(lengths)
    noise = np.random.default_rng(seed).standard_normal((len(places), repeats))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    log_p = np.log(places)[:, None]
    rewards = w_mu * log_p + b_mu + noise * (w_sigma * log_p + b_sigma)
    return torch.tensor(rewards.ravel()), torch.tensor(places.repeat(repeats))


def noisy_rewards(seed=0, responses=3000):
    """Responses of 1 to 60 units with rewards scattered about the Phi lines."""
    rng = np.random.default_rng(seed)
    places = units(rng.integers(1, 61, responses))
    w_mu, w_sigma, b_mu, b_sigma = PHI
    spread = w_sigma * np.log(places) + b_sigma
    return torch.tensor(w_mu * np.log(places) + b_mu + spread * rng.standard_normal(len(places))), torch.tensor(places)


# golden vectors


def test_golden_phi_with_four_units():
    normalizer, p = published(PHI), torch.tensor([0.25, 0.5, 0.75, 1.0])
    torch.testing.assert_close(
        normalizer.mean(p), torch.tensor([-0.59251, -0.06101, 0.24991, 0.47050]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(normalizer.std(p), torch.tensor([2.47776, 2.65583, 2.75999, 2.83390]), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        normalizer.transform(torch.ones(4), p),
        torch.tensor([0.64272, 0.39950, 0.27177, 0.18684]),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.filterwarnings("ignore:the fitted spread")
@pytest.mark.parametrize(("parameters", "spreads"), PUBLISHED_STD)
def test_golden_spreads_of_published_models(parameters, spreads):
    normalizer = published(parameters, std_floor=1e-3)
    for p, spread in zip((1, 0.1, 0.01, 1 / 1024), spreads, strict=True):
        assert normalizer.std(p) == pytest.approx(spread, abs=0.006)


def test_llama3_sft_token_spread_is_never_non_positive_at_1024_tokens():
    """Invariant 19."""
    normalizer = published(LLAMA3_SFT_TOKEN)
    p = torch.arange(1, 1025) / 1024
    with pytest.warns(UserWarning, match="below the floor") as caught:
        spread = normalizer.std(p)
        normalizer.transform(torch.ones(1024), p)  # warns once, not at every step
    assert len(caught) == 1
    assert spread.min().item() == pytest.approx(0.54513)  # a tenth of the spread at p = 1
    assert (normalizer.transform(normalizer.mean(p) + 1, p) > 0).all()  # no sign is flipped


def test_the_unguarded_llama3_line_is_negative_beyond_245_units():
    normalizer = published(LLAMA3_SFT_TOKEN, std_floor=1e-9)
    assert normalizer.std(1 / 245) > 1e-9
    with pytest.warns(UserWarning, match="below the floor"):
        assert normalizer.std(1 / 246) == 1e-9


def test_no_warning_where_the_floor_does_not_bind():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published(PHI).transform(torch.ones(1024), torch.arange(1, 1025) / 1024)


# fitting


@pytest.mark.parametrize(
    ("lengths", "repeats"),
    [
        ([50], 100),
        ([50], 2),
        (range(1, 41), 2),
        ([3000], 2),
        (range(1, 120), 2),
        ([7], 3),
        (range(2, 300, 7), 20),
    ],
)
@pytest.mark.parametrize("parameters", [PHI, (-0.3, -0.2, 12.0, 0.7), (0.0, 0.0, -4.0, 2.0)])
def test_exact_data_give_their_parameters_back(parameters, lengths, repeats):
    """Invariant 17."""
    normalizer = LocationNormalizer().fit(*exact_rewards(parameters, lengths, repeats))
    fitted = (normalizer.w_mu, normalizer.w_sigma, normalizer.b_mu, normalizer.b_sigma)
    assert fitted == pytest.approx(parameters, abs=1e-6)


def test_responses_of_thousands_of_units_make_no_leverage_point():
    """Rounding p to three decimals would turn 1/3000 into 0 and ln p into -23."""
    normalizer = LocationNormalizer().fit(*exact_rewards(PHI, [3000], 2))
    assert normalizer.fitted_range == (1 / 3000, 1.0)
    assert min(point.location for point in normalizer.bins) >= 1 / 3000


def test_training_rewards_come_out_standardized_at_every_location():
    """Invariant 18."""
    rewards, places = noisy_rewards()
    normalizer = LocationNormalizer().fit(rewards, places)
    scalar = published((0.0, 0.0, rewards.mean().item(), rewards.std().item()))

    def worst(values):
        bins, counts = bin_locations(places.numpy())
        populous = [values.numpy()[bins == i] for i in range(len(counts)) if counts[i] >= 300]
        assert len(populous) > 50
        return max(abs(v.mean()) for v in populous), max(abs(v.std() - 1) for v in populous)

    off_mean, off_std = worst(normalizer.transform(rewards, places))
    assert off_mean < 4 / math.sqrt(300) and off_std < 4 / math.sqrt(2 * 300)  # four standard errors
    assert worst(scalar.transform(rewards, places))[0] > 0.5  # the negative control: one mean for all locations
    assert normalizer.r2["mean"] > 0.9 and normalizer.r2["std"] > 0.5
    assert normalizer.w_mu == pytest.approx(PHI[0], abs=0.05) and normalizer.b_sigma == pytest.approx(PHI[3], abs=0.05)


def test_bins_hold_means_and_population_spreads_of_their_rewards():
    rewards, places = (
        torch.tensor([1.0, 3.0, 5.0, 7.0, 4.0, 8.0]),
        torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0]),
    )
    normalizer = LocationNormalizer().fit(rewards, places)
    half, end = normalizer.bins
    assert (half.location, half.mean, half.std, half.count) == pytest.approx((0.5, 3.0, math.sqrt(8 / 3), 3))
    assert (end.location, end.mean, end.std, end.count) == pytest.approx((1.0, 19 / 3, math.sqrt(26 / 9), 3))
    assert [half.mean_residual, end.mean_residual, half.std_residual, end.std_residual] == pytest.approx([0] * 4)


def test_outlying_bins_move_huber_less_than_least_squares():
    """Invariant 17."""
    x = np.log(np.arange(1, 41) / 40)
    y = 0.8 * x + 0.5 + 0.01 * np.sin(np.arange(40))
    y[[0, 3, 5]] += [40.0, 25.0, 60.0]
    slope, intercept = robust_line(x, y)
    least_squares = np.polyfit(x, y, 1)
    assert abs(slope - 0.8) < 0.02 < abs(least_squares[0] - 0.8)
    assert abs(intercept - 0.5) < 0.02 < abs(least_squares[1] - 0.5)


def test_robust_line_agrees_with_scikit_learn_on_well_scaled_data():
    from sklearn.linear_model import HuberRegressor

    rng = np.random.default_rng(1)
    x = np.linspace(-2, 2, 60)
    y = 1.5 * x - 0.2 + rng.standard_t(2, 60)
    reference = HuberRegressor(alpha=0.0, tol=1e-9, max_iter=1000).fit(x[:, None], y)
    assert robust_line(x, y) == pytest.approx((reference.coef_[0], reference.intercept_), abs=1e-4)
    assert robust_line(1e3 * x, 1e6 * y) == pytest.approx(
        (1e3 * reference.coef_[0], 1e6 * reference.intercept_), rel=1e-4
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 40), st.sampled_from([1e-6, 1.0, 1e6]))
def test_robust_line_always_converges(seed, n, scale):
    rng = np.random.default_rng(seed)
    x, y = np.log(rng.uniform(1e-3, 1, n)), rng.standard_cauchy(n) * scale
    assert np.isfinite(robust_line(x, y)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=60))
def test_bins_partition_the_rewards_in_order_of_location(lengths):
    places = units(lengths)
    bins, counts = bin_locations(places)
    assert counts.sum() == len(places) and (counts > 0).all()
    assert (np.diff(bins[np.argsort(places, kind="stable")]) >= 0).all()
    for place in np.unique(places):
        assert len(set(bins[places == place])) == 1
    assert (counts >= min(2, len(places))).all()


def test_a_common_location_is_not_mixed_with_rare_neighbours():
    places = np.concatenate([np.full(400, 0.5), [0.97, 0.98, 0.99], np.full(400, 1.0), units([9] * 40)])
    bins, counts = bin_locations(places)
    assert set(bins[places == 1.0]) == {bins.max()} and counts[bins.max()] == 440
    assert len(set(bins[(places > 0.9) & (places < 1)])) == 1


def test_a_spread_that_would_turn_negative_inside_the_fit_is_reported_and_guarded():
    w_mu, w_sigma, b_mu, b_sigma = LLAMA3_SFT_TOKEN
    places = np.arange(1, 1025) / 1024
    spread = np.maximum(w_sigma * np.log(places) + b_sigma, 0.05)
    rewards = (w_mu * np.log(places) + b_mu)[:, None] + spread[:, None] * np.array([-1.0, 1.0, -1.0, 1.0])
    with pytest.warns(UserWarning, match="below the floor"):
        normalizer = LocationNormalizer().fit(torch.tensor(rewards.ravel()), torch.tensor(places.repeat(4)))
    assert normalizer.std(torch.tensor(places)).min() > 0


def test_one_location_gives_a_scalar_normalizer():
    normalizer = LocationNormalizer().fit(torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.ones(4))
    assert (normalizer.w_mu, normalizer.w_sigma) == (0.0, 0.0)
    assert (normalizer.b_mu, normalizer.b_sigma) == pytest.approx((3.0, math.sqrt(3.5)))
    assert normalizer.r2 == {"mean": None, "std": None}
    z = normalizer.transform(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.01]))
    torch.testing.assert_close(z, torch.tensor([0.0, 1 / math.sqrt(3.5)]))


def test_float32_rewards_on_merged_locations_are_fitted_in_float64():
    rewards, places = exact_rewards(PHI, range(1, 60), 4)
    normalizer = LocationNormalizer().fit(rewards.float() + 0.0, places.float())
    assert normalizer.w_mu == pytest.approx(PHI[0], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "places", "message"),
    [
        ([], [], "no rewards"),
        ([1.0, math.nan], [0.5, 1.0], "1 of 2 rewards"),
        ([1.0, 2.0], [0.0, 1.0], "padding"),
        ([1.0, 2.0], [1.0, 1.5], "0, 1"),
        ([2.0, 2.0, 2.0], [0.5, 1.0, 1.0], "same reward"),
        ([2.0], [1.0], "same reward"),
    ],
)
def test_unusable_calibration_data_are_refused(rewards, places, message):
    with pytest.raises(ValueError, match=message):
        LocationNormalizer().fit(np.array(rewards), np.array(places))


def test_as_many_locations_as_rewards():
    with pytest.raises((ValueError, TypeError)):  # TypeError where shapes are checked on entry
        LocationNormalizer().fit(np.ones(2), np.ones(1))


# transform


def test_p_1_gives_the_intercepts_exactly_and_zero_slopes_are_the_scalar_normalizer():
    """Invariant 20."""
    normalizer = published(PHI)
    assert (normalizer.mean(1.0), normalizer.std(1.0)) == (PHI[2], PHI[3])
    scalar = published((0.0, 0.0, 0.5, 2.0))
    rewards = torch.tensor([[1.0, 2.0, -3.0]])
    torch.testing.assert_close(scalar.transform(rewards, torch.tensor([[0.1, 0.5, 1.0]])), (rewards - 0.5) / 2)


def test_padding_gives_zero_and_takes_no_part_in_the_gradient():
    rewards = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, -1.0]], requires_grad=True)
    places = torch.tensor([[0.5, 1.0, 0.0], [1.0, 0.0, 0.0]])
    z = published(PHI).transform(rewards, places)
    z.sum().backward()
    assert (z[places == 0] == 0).all() and (rewards.grad[places == 0] == 0).all()
    torch.testing.assert_close(
        rewards.grad[places > 0], torch.tensor([1 / 2.65583, 1 / 2.8339, 1 / 2.8339]), atol=1e-5, rtol=0
    )


def test_an_empty_batch_and_half_precision_are_fine():
    normalizer = published(PHI)
    assert normalizer.transform(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)
    z = normalizer.transform(torch.ones(4).bfloat16(), torch.tensor([0.25, 0.5, 0.75, 1.0]))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, torch.tensor([0.64272, 0.39950, 0.27177, 0.18684]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_transform_compiles_to_one_graph():
    """In a process of its own, where no shape checker wraps the functions."""
    program = """
import torch
from reward_models import LocationNormalizer
normalizer = LocationNormalizer.from_parameters(1.7340, 0.9906, 1.3212, 5.4513)
compiled = torch.compile(normalizer.transform, fullgraph=True, backend="eager")
rewards, places = torch.randn(3, 5), torch.rand(3, 5) * 0.9 + 0.1
torch.testing.assert_close(compiled(rewards, places), normalizer.transform(rewards, places))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_transform_stays_on_the_device_without_waiting():
    normalizer = published(PHI)
    rewards, places = torch.ones(4, device="cuda"), torch.tensor([0.25, 0.5, 0.75, 1.0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        z = normalizer.transform(rewards, places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(z.cpu(), torch.tensor([0.64272, 0.39950, 0.27177, 0.18684]), atol=1e-5, rtol=0)


def test_an_unfitted_normalizer_transforms_nothing():
    with pytest.raises(ValueError, match="no parameters yet"):
        LocationNormalizer().transform(torch.ones(1), torch.ones(1))


# files and guards


def test_save_and_load_round_trip(tmp_path):
    """Invariant 21."""
    fitted = LocationNormalizer(fingerprint="abc123", rule="entropy>1.75").fit(*noisy_rewards(responses=200))
    fitted.save(tmp_path / "normalizer.json")
    loaded = LocationNormalizer.load(tmp_path / "normalizer.json")
    assert vars(loaded) == vars(fitted)
    json.loads((tmp_path / "normalizer.json").read_text(), parse_constant=pytest.fail)  # strict JSON, no NaN
    assert [path.name for path in tmp_path.iterdir()] == ["normalizer.json"]


def test_published_parameters_survive_a_file_too(tmp_path):
    published(PHI).save(tmp_path / "n.json")
    assert LocationNormalizer.load(tmp_path / "n.json").std(0.1) == published(PHI).std(0.1)


@pytest.mark.parametrize("key", ["w_mu", "w_sigma", "b_mu", "b_sigma", "std_floor", "fingerprint"])
def test_a_missing_key_is_never_filled_in(tmp_path, key):
    """Invariant 20."""
    path = tmp_path / "normalizer.json"
    published(PHI).save(path)
    record = json.loads(path.read_text())
    del record[key]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"normalizer.json lacks {key}.*segrew calibrate"):
        LocationNormalizer.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("w_mu", math.nan),
        ("b_mu", math.inf),
        ("w_sigma", "0.2"),
        ("b_mu", None),
        ("b_sigma", 0.0),
        ("b_sigma", -1.0),
        ("std_floor", 0.0),
        ("std_floor", -0.1),
        ("std_floor", math.nan),
        ("bins", [{"location": 1.0}]),
    ],
)
def test_damaged_values_are_refused(tmp_path, key, value):
    path = tmp_path / "normalizer.json"
    published(PHI).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=r"normalizer.json: .*segrew calibrate"):
        LocationNormalizer.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\xff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "normalizer.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"normalizer.json .*segrew calibrate"):
        LocationNormalizer.load(path)


def test_a_missing_file_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="segrew calibrate"):
        LocationNormalizer.load(tmp_path / "normalizer.json")


def test_another_segmentation_rule_is_refused():
    """Invariant 21."""
    normalizer = published(PHI, fingerprint="aaaa", rule="entropy>2.0")
    normalizer.require("aaaa", rule="entropy>2.0")
    with pytest.raises(ValueError, match=r"runs/rm.*entropy>2\.0 .*entropy>1\.75.*segrew calibrate"):
        normalizer.require("bbbb", rule="entropy>1.75", source="runs/rm/normalizer.json")
    with pytest.raises(ValueError, match="unknown rule"):
        published(PHI).require("bbbb", rule="entropy>1.75")


def test_a_second_fit_knows_nothing_of_the_first():
    rewards, places = noisy_rewards(responses=200)
    for floor in (None, 0.5):
        fresh = LocationNormalizer(std_floor=floor).fit(rewards, places)
        again = LocationNormalizer(std_floor=floor).fit(100 * rewards, places).fit(rewards, places)
        assert again.modes == fresh.modes and again.std_floor == fresh.std_floor == (floor or fresh.std(1.0) / 10)


def test_a_last_unit_that_follows_another_law_is_reported():
    rewards, places = noisy_rewards(responses=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalizer = LocationNormalizer().fit(rewards, places)
    assert abs(normalizer.end_offset) < 0.3
    shifted = torch.where(places == 1, rewards - 9.0, rewards)  # 9 / 2.83: about three standard deviations
    with pytest.warns(UserWarning, match=r"-3\.\d standard deviations.*read_position content"):
        LocationNormalizer().fit(shifted, places)
    assert published(PHI).end_offset is None


def test_merging_rare_locations_does_not_inflate_the_spread():
    """With a steep mean, naive pooling would add the slope inside a bin to its spread."""
    rewards, places = exact_rewards((5.0, 0.0, 0.0, 0.1), range(1, 90), 2)
    curves = fit_location_curves(rewards.numpy(), places.numpy())
    assert len(curves.bins) < len(np.unique(places)) / 2
    assert [point.std for point in curves.bins] == pytest.approx([0.1] * len(curves.bins), abs=1e-9)


# other estimators and modes


def test_weighted_least_squares_by_hand():
    x, y, weights = np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 5.0]), np.array([1, 2, 1])
    # means 1 and 7/4; covariance (1.75 + 3.25) / 4 over variance 2 / 4
    assert weighted_line(x, y, weights) == pytest.approx((2.5, -0.75))
    assert weighted_line(np.ones(3), y, weights) == (0.0, 1.75)


def test_weighted_regression_weighs_a_bin_by_its_rewards():
    """Locations with 2,000, 2,000 and 20 rewards, of means 1, 2, 41 and spreads 1, 1, 3; numpy as the reference."""
    places = np.concatenate([np.full(2000, 0.5), np.full(2000, 1.0), np.full(20, 0.25)])
    rewards = np.concatenate([np.tile([0.0, 2.0], 1000), np.tile([1.0, 3.0], 1000), np.tile([38.0, 44.0], 10)])
    fitted = LocationNormalizer(regression="weighted").fit(rewards, places)
    x, roots = np.log([0.5, 1.0, 0.25]), np.sqrt([2000, 2000, 20])
    assert (fitted.w_mu, fitted.b_mu) == pytest.approx(tuple(np.polyfit(x, [1, 2, 41], 1, w=roots)))
    assert (fitted.w_sigma, fitted.b_sigma) == pytest.approx(tuple(np.polyfit(x, [1, 1, 3], 1, w=roots)))


@pytest.mark.parametrize("regression", ["huber", "weighted"])
@pytest.mark.parametrize("lengths", [[50], range(1, 60)])
def test_a_log_link_recovers_a_power_law_and_is_positive_everywhere(regression, lengths):
    places = units(lengths)
    noise = np.random.default_rng(0).standard_normal((len(places), 4))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    rewards = 0.5 * np.log(places)[:, None] + 1.0 + noise * (2.0 * places**0.7)[:, None]
    normalizer = LocationNormalizer(link="log", regression=regression)
    normalizer.fit(rewards.ravel(), places.repeat(4))
    fitted = (normalizer.w_mu, normalizer.w_sigma, normalizer.b_mu, normalizer.b_sigma)
    assert fitted == pytest.approx((0.5, 0.7, 1.0, math.log(2.0)), abs=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert normalizer.std(1e-6) == pytest.approx(2.0 * 1e-6**0.7, rel=1e-4)
        assert (normalizer.std(torch.arange(1, 5000) / 5000) > 0).all()
    assert normalizer.std_floor is None


def test_a_log_link_without_any_spread_is_refused():
    with pytest.raises(ValueError, match="same reward"):
        LocationNormalizer(link="log").fit(np.array([2.0, 2.0, 2.0]), np.array([0.5, 1.0, 1.0]))


def test_scalar_modes_by_hand():
    rewards, places = np.array([1.0, 3.0, 5.0, 7.0]), np.array([0.5, 1.0, 0.5, 1.0])
    for link in ("linear", "log"):
        fitted = LocationNormalizer(link=link).fit(rewards, places)
        z = torch.tensor([4.0, 6.0])
        everywhere, last, none = (fitted.with_mode(mode) for mode in ("global", "last", "none"))
        p = torch.tensor([0.1, 1.0])
        torch.testing.assert_close(everywhere.transform(z, p), torch.tensor([0.0, 2 / math.sqrt(5)]))
        torch.testing.assert_close(last.transform(z, p), torch.tensor([-0.5, 0.5]))  # mean 5, spread 2
        torch.testing.assert_close(none.transform(z, p), z)
        assert fitted.mode == "location" and last.with_mode("location").w_mu == fitted.w_mu


def test_the_mode_in_force_and_the_others_survive_a_file(tmp_path):
    fitted = LocationNormalizer(mode="last", link="log", regression="weighted", location_by="token", fingerprint="a")
    fitted.fit(*noisy_rewards(responses=200))
    fitted.save(tmp_path / "n.json")
    loaded = LocationNormalizer.load(tmp_path / "n.json")
    assert vars(loaded) == vars(fitted) and (loaded.w_mu, loaded.mode) == (0.0, "last")
    assert loaded.with_mode("location").mean(0.3) == fitted.with_mode("location").mean(0.3)


def test_a_file_of_an_older_version_is_a_location_normalizer(tmp_path):
    path = tmp_path / "n.json"
    published(PHI).save(path)
    record = json.loads(path.read_text())
    for name in ("modes", "mode", "regression", "link", "location_by"):
        del record[name]
    path.write_text(json.dumps(record))
    loaded = LocationNormalizer.load(path)
    assert (loaded.mode, loaded.mean(0.5)) == ("location", published(PHI).mean(0.5))
    with pytest.raises(ValueError, match=r"no numbers for the mode 'global' \(it has location\).*segrew calibrate"):
        loaded.with_mode("global")


def test_an_unknown_choice_is_refused(tmp_path):
    path = tmp_path / "n.json"
    published(PHI).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"link": "cubic"}))
    with pytest.raises(ValueError, match=r"(?s)n\.json: .*'cubic'.*segrew calibrate"):
        LocationNormalizer.load(path)


def test_token_locations_are_shares_of_tokens():
    cut = Segmentation(torch.tensor([[0, 0, 0, 1], [0, 1, 2, -1]]))
    by_token = LocationNormalizer.from_parameters(1.0, 0.0, 0.0, 1.0, location_by="token")
    torch.testing.assert_close(by_token.locations(cut), torch.tensor([[0.75, 1.0, 0.0], [1 / 3, 2 / 3, 1.0]]))
    torch.testing.assert_close(published(PHI).locations(cut), torch.tensor([[0.5, 1.0, 0.0], [1 / 3, 2 / 3, 1.0]]))
    expected = torch.tensor([[-math.log(0.75), 0.0, 0.0], [math.log(3), math.log(1.5), 0.0]])
    torch.testing.assert_close(by_token.normalize(torch.zeros(2, 3), cut), expected)


def test_released_normalizers_are_presets():
    phi = LocationNormalizer.from_preset("phi3-mini-1.75")
    places = torch.tensor([0.25, 0.5, 0.75, 1.0])
    normalized = phi.transform(torch.ones(4), places).tolist()
    assert normalized == pytest.approx([0.64272, 0.39950, 0.27177, 0.18684], abs=1e-4)
    llama = LocationNormalizer.from_preset("llama3-sft-token")
    assert [llama.b_sigma + llama.w_sigma * math.log(p) for p in (1, 0.1)] == pytest.approx([5.45, 3.17], abs=0.005)
    assert len(PRESETS) == 10 and all(LocationNormalizer.from_preset(name).std(1.0) > 0 for name in PRESETS)
    bandit = LocationNormalizer.from_preset("llama3.1-instruct-bandit")
    assert (
        bandit.transform(torch.tensor([2.109375]), torch.tensor([1.0])).item() == 1.0
    )  # (2.109375 + 0.828125) / 2.9375


def test_a_preset_is_for_its_own_rule():
    own = LocationNormalizer.from_preset("phi3-mini-2.0", rule="entropy>2 as in dense_rlhf_release", fingerprint="x")
    own.require("x", rule="entropy>2")
    with pytest.raises(ValueError, match=r"fitted for rule entropy>2, and the rewards are read under entropy>1\.75"):
        LocationNormalizer.from_preset("phi3-mini-2.0", rule="entropy>1.75")
    with pytest.raises(ValueError, match=r"no normalizer preset 'phi': there are phi3-mini-1\.75"):
        LocationNormalizer.from_preset("phi")


def test_compat_fits_as_the_released_script():
    """Invariant 38. The released recipe, spelled with dictionaries: buckets by rounded p, Huber on ln(p + 1e-10)."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 12, 300)
    p = np.concatenate([np.arange(1, n + 1) / n for n in counts])
    r = 0.8 * np.log(p) + 0.5 + rng.normal(size=len(p)) * (0.3 * np.log(p) + 2.8)
    buckets: dict[float, list[float]] = {}
    for place, reward in zip(p, r, strict=True):
        buckets.setdefault(round(float(place), 3), []).append(float(reward))
    places = np.array(sorted(buckets))
    x = np.log(places + 1e-10)[:, None]
    lines = []
    for statistic in (np.mean, np.std):
        model = HuberRegressor(max_iter=1000).fit(x, [statistic(buckets[place]) for place in places])
        lines.append((model.coef_[0], model.intercept_))
    found = LocationNormalizer().fit(r, p, compat="dense_rlhf_release")
    assert (found.w_mu, found.b_mu) == pytest.approx(lines[0], abs=1e-4)
    assert (found.w_sigma, found.b_sigma) == pytest.approx(lines[1], abs=1e-4)
    assert [point.location for point in found.bins] == pytest.approx(places.tolist())


def test_compat_takes_no_other_estimator():
    rewards, places = noisy_rewards(responses=50)
    with pytest.raises(ValueError, match="own recipe of the fit; leave --regression"):
        LocationNormalizer(link="log").fit(rewards, places, compat="dense_rlhf_release")
