"""One set of rollouts, many granularities: rules by name, gradients against autograd, an honest recommendation."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from policy.gradient_noise import sampled_coordinates
from policy.losses import policy_loss
from policy.ppo_run import open_run
from policy.probe import ProbeConfig, experiences_of, last_layer, micro_batch_gradients, rule_of, run_probe
from policy.probe_report import recommend, wins
from policy.scoring import take
from segrew.cli import main
from segrew.rule_flags import RuleSettings
from segrew.segmentation import SegmentationConfig


def test_granularities_by_name():
    assert rule_of("token", RuleSettings()) == SegmentationConfig(rule="token")
    assert rule_of("ngram-7", RuleSettings()) == SegmentationConfig(rule="ngram", n=7)
    assert rule_of("entropy~4", RuleSettings()) == SegmentationConfig(rule="entropy", target_length=4.0)
    for name in ("entropy", "ngram", "ngram-x", "token-3", "paragraph"):
        with pytest.raises(ValueError, match=f"--granularities {name}"):
            rule_of(name, RuleSettings())


def test_the_probe_writes_a_comparison_and_a_picture(settings):
    config = settings(rollout_batch_size=12, per_device_train_batch_size=3, max_new_tokens=14)
    names = ["token", "ngram-3", "entropy~2", "perplexity", "random_ngram", "response"]
    path = run_probe(config, ProbeConfig(granularities=names), Console(file=io.StringIO()))
    result = json.loads((path / "probe.json").read_text())
    rows = {row["rule"]: row for row in result["granularities"]}
    assert list(rows) == names and result["answers"] == 12
    assert rows["response"]["units"] == 1 <= rows["token"]["unit_length"] < 1.2  # a stop token joins the token before
    assert 2 < rows["ngram-3"]["unit_length"] <= 3 and 1.2 < rows["entropy~2"]["unit_length"] < 3.5
    assert all(row["gradient_noise"] > 0 and row["advantage_variance"] > 0 for row in rows.values())
    assert (path / "probe.png").stat().st_size > 1000
    assert json.loads((path / "run.json").read_text())["command"] == "probe"
    assert not (path / "metrics.jsonl").exists()


def test_gradients_of_micro_batches_are_those_of_the_whole(settings):
    """Weighted by their tokens they add up to the gradient of the batch, here of every last-layer coordinate."""
    run, _ = open_run(settings(rollout_batch_size=6, per_device_train_batch_size=4, bf16=False), command="probe")
    rules = {name: rule_of(name, RuleSettings()) for name in ("token", "ngram-3")}
    rollout, experiences = experiences_of(run, rules)
    gradients, shares = micro_batch_gradients(run, rollout, experiences)
    assert len(shares) == 2 and shares.sum() == sum(rollout.conversations.lengths)
    model = run.roles.policy
    weights = last_layer(model)
    names = [name for name, p in model.named_parameters() if any(p is w for w in weights)]
    assert names and all(".layers.1." in name for name in names)
    rows = list(range(6))
    for name, experience in experiences.items():
        logprobs, _ = model(rollout.conversations, temperature=1.0)
        actions = take(experience.units.actions, rows, logprobs.shape[1])
        loss, _ = policy_loss(logprobs, rollout.logprobs, experience.weights, actions)
        grads = torch.autograd.grad(loss, weights)
        mean = (shares[:, None] * gradients[name]).sum(0) / shares.sum()
        whole = torch.cat([g.flatten()[at] for g, at in zip(grads, sampled_coordinates(weights), strict=True)])
        torch.testing.assert_close(mean, whole, atol=1e-5, rtol=1e-3)


def row(rule, noise, draws):
    return {"rule": rule, "gradient_noise": noise, "draws": draws}


def test_the_recommendation_says_how_sure_it_is():
    clear = [row("token", 3.0, [3.0] * 10), row("ngram-5", 1.0, [1.0] * 9 + [4.0])]
    assert wins(clear) == pytest.approx([0.1, 0.9])
    assert recommend(clear, 8).startswith("ngram-5 has the least gradient noise (1; the lowest in 90% of 10 resamples")
    assert "try --action_rule for ngram-5" in recommend(clear, 8)
    assert "not clear from fewer than 8 micro-batches" in recommend(clear, 7) and "try" not in recommend(clear, 7)
    close = [row("token", 1.1, [1.1, 1.1, 0.9, 1.0]), row("response", 1.0, [1.0, 1.0, 1.0, 1.1])]
    assert "not clear from token" in recommend(close, 8) and "try" not in recommend(close, 8)


def test_answers_of_one_micro_batch_are_refused_before_a_model_loads(settings, monkeypatch):
    monkeypatch.setattr("policy.probe.open_run", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"--rollout_batch_size 6: one micro-batch .* set it to 64"):
        run_probe(settings(per_device_train_batch_size=8), ProbeConfig(), Console(file=io.StringIO()))


def test_the_command_runs(settings, capsys):
    config = settings(rollout_batch_size=4, per_device_train_batch_size=2, max_new_tokens=6)
    names = ("model_name_or_path", "reward_model_path", "dataset_name", "output_dir", "rollout_batch_size",
             "per_device_train_batch_size", "max_new_tokens", "max_prompt_length")  # fmt: skip
    given = dataclasses.asdict(config)
    flags = [word for name in names for word in (f"--{name}", str(given[name]))]
    assert main(["probe", *flags, "--granularities", "token", "response"]) == 0
    assert "gradient noise" in capsys.readouterr().out
