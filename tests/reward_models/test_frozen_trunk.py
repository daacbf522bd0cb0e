"""The head on a frozen trunk: the minimum of its objective, found by someone else."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from reward_models.frozen_trunk import fit_head, scores_of
from reward_models.pairs import segment_pairs, unit_states
from segrew.chat import ChatFormat
from segrew.preferences import PreferencePair
from segrew.run_directory import read_jsonl
from segrew.segmentation import SegmentationConfig

PAIRS, WIDTH, PENALTY = 40, 6, 0.05


@pytest.fixture(scope="module")
def data():
    """Rows of one to five units; chosen rows lean one way."""
    torch.manual_seed(0)
    counts = torch.randint(1, 6, (2 * PAIRS,))
    unit_mask = torch.arange(5)[None] < counts[:, None]
    states = torch.randn(int(counts.sum()), WIDTH) * torch.tensor([1.0, 3.0, 0.2, 1.0, 1.0, 1.0])
    states += 0.4 * (torch.arange(2 * PAIRS) % 2 == 0).repeat_interleave(counts)[:, None]
    return states, unit_mask


def rows_of(data) -> list[np.ndarray]:
    states, unit_mask = data
    return [part.numpy().astype(np.float64) for part in states.split(unit_mask.sum(1).tolist())]


@pytest.mark.parametrize("aggregator, pool", [("mean", lambda h: h.mean(0)), ("sum", lambda h: h.sum(0))])
def test_mean_and_sum_are_logistic_regression_without_intercept(data, aggregator, pool):
    """Minimising n·loss + nλ|w|²/2 is scikit-learn's |w|²/2 + C·n·loss with C = 1/(nλ); each pair both ways round."""
    spread = data[0].double().std(0).numpy()
    pooled = np.stack([pool(rows) for rows in rows_of(data)]) / spread
    differences = pooled[0::2] - pooled[1::2]
    model = LogisticRegression(C=1 / (2 * PAIRS * PENALTY), fit_intercept=False, tol=1e-10, max_iter=10_000)
    model.fit(np.concatenate([differences, -differences]), np.repeat([1, 0], PAIRS))
    found = fit_head(*data, aggregator=aggregator, penalty=PENALTY)
    np.testing.assert_allclose(found.numpy(), model.coef_[0] / spread, atol=2e-3)


def test_soft_maximum_reaches_the_minimum_that_scipy_finds(data):
    tau, spread, rows = 0.5, data[0].double().std(0).numpy(), rows_of(data)

    def objective(v):
        scores = np.array([tau * np.logaddexp.reduce(h / spread @ v / tau) for h in rows])
        return np.logaddexp(0, -(scores[0::2] - scores[1::2])).mean() + 0.5 * PENALTY * v @ v

    best = minimize(objective, np.zeros(WIDTH), method="BFGS", options={"gtol": 1e-8})
    found = fit_head(*data, aggregator="softmax", temperature=tau, penalty=PENALTY).double().numpy() * spread
    assert objective(found) == pytest.approx(best.fun, abs=1e-6)
    np.testing.assert_allclose(found, best.x, atol=5e-3)


def test_a_feature_s_unit_does_not_matter(data):
    states, unit_mask = data
    scale = torch.tensor([1.0, 100.0, 0.01, 1.0, 5.0, 1.0])
    one = fit_head(states, unit_mask, aggregator="mean", penalty=PENALTY)
    other = fit_head(states * scale, unit_mask, aggregator="mean", penalty=PENALTY)
    torch.testing.assert_close(other * scale, one, atol=1e-3, rtol=1e-3)


def test_a_dead_feature_gets_no_weight(data):
    states, unit_mask = data
    weight = fit_head(
        torch.cat([states, torch.zeros(len(states), 1)], 1), unit_mask, aggregator="mean", penalty=PENALTY
    )
    assert weight.isfinite().all() and weight[-1] == 0


def test_scores_are_the_aggregate_of_dot_products(data):
    states, unit_mask = data
    weight = torch.arange(1.0, WIDTH + 1)
    found = scores_of(weight, states, unit_mask, aggregator="mean")
    expected = [float((rows @ weight.double().numpy()).mean()) for rows in rows_of(data)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


def test_the_trained_head_scores_in_the_directory_as_in_the_fit(tmp_path, train, short_pairs):
    """The scores that the fit saw, recomputed from the saved directory by whole forward passes."""
    model = train(tmp_path / "a", tune="head", rule="response")
    features = [(p.prompt, text) for p in short_pairs for text in (p.chosen, p.rejected)]
    scored = model.score([f[0] for f in features], [f[1] for f in features])
    with torch.no_grad():
        for (prompt, text), record in zip(features, scored, strict=True):
            ids = model.chat.prompt_ids(prompt) + model.chat.response_ids(text)
            assert record.score == pytest.approx(model.model(input_ids=torch.tensor([ids])).logits.item(), abs=1e-4)
    margins = torch.tensor([scored[2 * i].score - scored[2 * i + 1].score for i in range(len(short_pairs))])
    (row,) = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert row["train_margin"] == pytest.approx(margins.mean().item(), abs=1e-3)
    assert row["train_accuracy"] == pytest.approx((margins > 0).float().mean().item())


def test_states_that_were_not_kept_are_asked_for(build_byte_tokenizer):
    chat = ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")
    pair = PreferencePair([{"role": "user", "content": "x"}], "a", "b")
    data = segment_pairs([pair], chat, SegmentationConfig(rule="token"), None, max_length=16)
    with pytest.raises(ValueError, match="with_states=True"):
        unit_states(data)
