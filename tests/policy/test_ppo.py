"""The loop on a tiny model: every cell of the grid, the first update, exact resume, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import policy.ppo as ppo
from policy import rloo
from policy.ppo import main, train_policy
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.reading import Readings
from segrew.data_options import DataOptions

METRICS = {
    "step", "reward/score", "reward/dense_sum", "kl/k1", "kl/k2", "kl/k3", "policy/loss", "policy/clip_fraction",
    "policy/ratio_max", "policy/entropy", "value/loss", "value/explained_variance", "advantage/l2", "return/l2",
    "units/count", "units/length", "response/length", "response/eos_rate", "time/rollout", "time/segment",
    "time/score", "time/wait", "time/update", "time/logprobs", "time/values", "time/advantages", "tokens_per_second",
    "memory/peak_mb",
    "kl/answer", "kl/coef", "policy/approx_kl", "policy/kl_loss", "policy/grad_norm", "value/grad_norm",
    "policy/updates", "policy/skipped_updates", "gradient/relative_variance", "reward/bad_rows", "reward/flat_prompts",
    "actions/count", "actions/length", "response/distinct_1", "response/distinct_2", "response/repetition",
}  # fmt: skip
UNREPEATABLE = ("time/", "tokens_per_second", "memory/peak_mb")


def lines(path: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def repeatable(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith(UNREPEATABLE)} for row in rows]


GRID = [
    ("response", None, "token", {}),  # bandit PPO
    ("entropy", "terminal", "token", {}),  # a segment reward model as bandit
    ("token", None, "token", {}),  # token-level PPO
    ("entropy", None, "token", {}),  # segment-level PPO
    ("entropy", "terminal", "ngram", {"ratio": "joint", "n": 3}),  # MA-PPO
    ("entropy", None, "entropy", {"ratio": "geometric", "missing_eos_penalty": 1.0}),  # macro and dense
    ("entropy", None, "random_ngram", {"lambda_scale": "token", "loss_reduction": "unit"}),
    ("entropy", None, "perplexity", {"temperature": 0.8, "loss_reduction": "sequence"}),
    ("response", "token", "response", {"normalizer": "none", "interpolation": "last"}),
    ("sentence", None, "sentence", {"total_steps": 2}),  # sentence-level PPO, and sentences acting
    ("entropy", "terminal", "python_ast", {"max_code_tokens": 4}),
    ("entropy", "python_ast", "sentence", {"normalizer": "none"}),
]


@pytest.mark.parametrize("reward, reward_rule, action_rule, changes", GRID)
def test_every_cell_of_the_grid_runs_through_one_loop(settings, reward, reward_rule, action_rule, changes):
    config = settings(reward, reward_rule=reward_rule, action_rule=action_rule, **changes)
    path = train_policy(config)
    rows = lines(path, "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        named = {key for key in row if not key.startswith("drift/")}
        assert named - {"units/live_agreement"} == METRICS
        assert ("units/live_agreement" in row) == (reward == "entropy")  # a rule that reads a model
        assert all(math.isfinite(value) for value in row.values())
    # The first update: policy and reference are one, old and new are one.
    assert rows[0]["kl/k1"] == rows[0]["kl/k2"] == rows[0]["kl/k3"] == 0.0
    assert rows[0]["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert rows[0]["policy/clip_fraction"] == 0.0
    assert rows[1]["kl/k2"] > 0
    if {"sentence", "python_ast"} & {reward, reward_rule}:  # random bytes have a line break or a full stop now and then
        return
    single = reward_rule == "terminal" or (reward_rule is None and reward == "response")
    assert (rows[0]["units/count"] == 1) == single


@pytest.mark.parametrize("reward_rule", ["terminal", "constituency"])
def test_a_parsing_rule_reports_how_often_it_could_not_parse(settings, parser_dir, reward_rule):
    rules = {"reward_rule": reward_rule, "action_rule": "constituency", "normalizer": "none"}
    path = train_policy(settings(**rules, parser=str(parser_dir), max_phrase_words=2, total_steps=1))
    (row,) = lines(path, "metrics.jsonl")
    assert set(row) - {"units/live_agreement"} == METRICS | {"units/parse_fallback_rate"}
    assert row["units/parse_fallback_rate"] == 0.0  # every byte is a token, so no word begins inside one


def test_b26_policy_equal_to_reference_has_kl_zero_and_ratio_one_for_any_batching(settings):
    """B26 a, with passes of other sizes than the update's."""
    config = settings(max_tokens_per_batch=40, per_device_train_batch_size=1, total_steps=1)
    (row,) = lines(train_policy(config), "metrics.jsonl")
    assert row["kl/k1"] == row["kl/k2"] == row["kl/k3"] == 0.0
    assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_samples_show_what_was_rewarded(settings):
    path = train_policy(settings(samples_per_step=3))
    rows = lines(path, "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for row in rows:
        assert set(row) == {"step", "split", "prompt", "response", "score", "segments"}
        assert "".join(segment["text"] for segment in row["segments"]) == row["response"]
        assert row["score"] == pytest.approx(sum(s["reward"] for s in row["segments"]) / len(row["segments"]), abs=1e-5)
        for k, segment in enumerate(row["segments"]):
            assert segment["location"] == pytest.approx((k + 1) / len(row["segments"]))
            p = segment["location"]
            expected = (segment["reward"] - 0.1 * math.log(p)) / (0.02 * math.log(p) + 0.1)
            assert segment["normalized"] == pytest.approx(expected, abs=1e-3)


def test_micro_batch_size_changes_nothing(settings, tmp_path):
    results = []
    for size, tokens in ((6, 1), (6, None)):
        config = settings(
            per_device_train_batch_size=size, train_tokens_per_batch=tokens, num_mini_batches=2, num_ppo_epochs=2,
            output_dir=str(tmp_path / f"{tokens}"),
        )  # fmt: skip
        path = train_policy(config)
        results.append((repeatable(lines(path, "metrics.jsonl")), load_file(path / "model.safetensors")))
    (small, small_weights), (large, large_weights) = results
    for a, b in zip(small, large, strict=True):
        assert (
            a.pop("gradient/relative_variance") > 0 and "gradient/relative_variance" not in b
        )  # none in one micro-batch
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
    for name, weight in small_weights.items():
        torch.testing.assert_close(weight, large_weights[name], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("use_peft", [False, True])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(settings, monkeypatch, tmp_path, prompts_file, use_peft):
    common = {
        "action_rule": "random_ngram", "num_ppo_epochs": 2, "num_mini_batches": 2, "total_steps": 4, "save_steps": 2,
        "eval_dataset": str(prompts_file), "eval_steps": 2, "use_peft": use_peft, "lr_scheduler_type": "linear",
    }  # fmt: skip
    whole = train_policy(settings(output_dir=str(tmp_path / "whole"), **common))
    killed = settings(output_dir=str(tmp_path / "killed"), **common)
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "report", _killed_after(3, ppo.report))
        with pytest.raises(KeyboardInterrupt):
            train_policy(killed)
    assert [row["step"] for row in lines(tmp_path / "killed", "metrics.jsonl")] == [1, 2, 3]
    resumed = train_policy(settings(output_dir=str(tmp_path / "killed"), resume_from_checkpoint="latest", **common))

    assert repeatable(lines(resumed, "metrics.jsonl")) == repeatable(lines(whole, "metrics.jsonl"))
    for name in ("samples.jsonl", "evaluation.jsonl"):
        assert lines(resumed, name) == lines(whole, name)
    expected = load_file(whole / "model.safetensors")
    for name, weight in load_file(resumed / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name


def _killed_after(step: int, report):
    def stand_in(run, metrics):
        report(run, metrics)
        if metrics["step"] == step:
            raise KeyboardInterrupt

    return stand_in


def test_resuming_refuses_other_settings_and_missing_checkpoints(settings):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        train_policy(settings(resume_from_checkpoint="latest"))
    path = train_policy(settings(save_steps=1, save_total_limit=1))
    assert [p.name for p in path.glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(ValueError, match=r"checkpoint-2 was made with other settings \(kl_coef 0\.05, now 0\.9\)"):
        train_policy(settings(resume_from_checkpoint="latest", kl_coef=0.9))
    with pytest.raises(ValueError, match="is no checkpoint"):
        train_policy(settings(resume_from_checkpoint=str(path)))
    longer = train_policy(settings(resume_from_checkpoint="latest", total_steps=3))
    assert [row["step"] for row in lines(longer, "metrics.jsonl")] == [1, 2, 3]


def test_lora_trains_from_its_own_reference_and_exports_a_plain_model(settings, policy_dir):
    path = train_policy(settings(use_peft=True, lora_r=4, gradient_checkpointing=True))
    rows = lines(path, "metrics.jsonl")
    assert rows[0]["kl/k2"] == 0.0 and rows[1]["kl/k2"] > 0
    before = load_file(Path(policy_dir) / "model.safetensors")
    after = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert set(before) <= set(after)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("proj" in name for name in moved)


@pytest.mark.parametrize("critic_init", ["sft", "reward_model"])
def test_the_critic_learns_and_leaves_reward_model_and_reference_alone(settings, reward_dirs, critic_init):
    before = load_file(reward_dirs["entropy"] / "model.safetensors")
    config = settings(critic_init=critic_init, total_steps=6, critic_learning_rate=3e-2, cliprange_value=None)
    rows = lines(train_policy(config), "metrics.jsonl")
    assert rows[-1]["value/explained_variance"] > rows[0]["value/explained_variance"]
    assert all(torch.equal(w, before[n]) for n, w in load_file(reward_dirs["entropy"] / "model.safetensors").items())


@pytest.mark.slow
def test_dense_reward_moves_the_policy_towards_it(settings, monkeypatch):
    """A reward of 1 for each byte below 64 and −1 above: their share must grow."""

    def read(self, conversations, segmentation, outputs):
        ids = conversations.response_ids
        rewards = torch.where(ids < 64, 1.0, -1.0).float().where(segmentation.mask, torch.tensor(0.0))
        return Readings(rewards, rewards.sum(1) / segmentation.counts)

    monkeypatch.setattr(SegmentRewardModel, "read", read)
    config = settings(
        "token", normalizer="none", total_steps=12, rollout_batch_size=32, learning_rate=1e-2, kl_coef=0.0,
        per_device_train_batch_size=32, critic_learning_rate=1e-2,
    )  # fmt: skip
    scores = [row["reward/score"] for row in lines(train_policy(config), "metrics.jsonl")]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.2


def test_a_reward_model_with_another_segmenter_gets_its_own_pass(settings, policy_dir, reward_dirs, tmp_path):
    moved = tmp_path / "other_policy"
    shutil.copytree(policy_dir, moved)
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    model.save_pretrained(moved)
    same = train_policy(settings(output_dir=str(tmp_path / "same"), total_steps=1))
    other = train_policy(settings(output_dir=str(tmp_path / "other"), total_steps=1, model_name_or_path=str(moved)))
    assert json.loads((same / "settings.json").read_text())["own_segmenter_pass"] is False
    assert json.loads((other / "settings.json").read_text())["own_segmenter_pass"] is True
    assert lines(other, "metrics.jsonl")[0]["kl/k2"] == 0.0


def test_effective_sampling_settings_are_recorded(settings):
    path = train_policy(settings(total_steps=0, stop_strings=["\n\n"], temperature=0.7))
    sampling = json.loads((path / "settings.json").read_text())["sampling"]
    assert sampling["top_k"] == 0 and sampling["top_p"] == 1.0 and sampling["temperature"] == 0.7
    assert sampling["stop_tokens"] == ["<|im_end|>"] and sampling["stop_strings"] == ["\n\n"]


def test_drift_from_the_calibrated_rewards_is_logged_and_warned_of_once(settings, tmp_path):
    """A normalizer whose mean lies far below every reward: the drift metrics are those of the stored samples."""
    directory = shutil.copytree(settings().reward_model_path, tmp_path / "rm")
    model = SegmentRewardModel.from_pretrained(directory)
    model.normalizer = LocationNormalizer.from_parameters(0.0, 0.0, -3.0, 0.5, fingerprint=model.fingerprint)
    model.normalizer.save(directory / "normalizer.json")
    config = settings(reward_model_path=str(directory), samples_per_step=6, max_new_tokens=30)
    with pytest.warns(UserWarning, match=r"left the range .*drift/mean .*segrew calibrate") as caught:
        path = train_policy(config)
    assert sum("left the range" in str(w.message) for w in caught) == 1
    rows = lines(path, "metrics.jsonl")
    for step, row in enumerate(rows, 1):
        kept = [s for line in lines(path, "samples.jsonl") if line["step"] == step for s in line["segments"]]
        z = torch.tensor([(s["reward"] + 3.0) / 0.5 for s in kept])
        late = torch.tensor([s["location"] > 2 / 3 + 1e-6 for s in kept])
        assert row["drift/mean"] == pytest.approx(z.mean().item(), abs=1e-4)
        assert row["drift/spread"] == pytest.approx(z.std(correction=0).item(), abs=1e-4)
        assert row["drift/mean_late"] == pytest.approx(z[late].mean().item(), abs=1e-4)
        assert row["drift/far"] == pytest.approx((z.abs() > 4).float().mean().item())
    assert not any(
        key.startswith("drift/")
        for key in lines(
            train_policy(settings(normalizer="none", total_steps=1, output_dir=str(tmp_path / "none"))), "metrics.jsonl"
        )[0]
    )


def test_b23_a_bad_reward_stops_before_any_update(settings, monkeypatch):
    read = SegmentRewardModel.read

    def broken(self, conversations, segmentation, outputs):
        readings = read(self, conversations, segmentation, outputs)
        readings.rewards[0, 0] = float("nan")
        return readings

    def no_update(*_, **__):
        raise AssertionError("updated on a bad reward")

    monkeypatch.setattr(SegmentRewardModel, "read", broken)
    monkeypatch.setattr(ppo, "update", no_update)
    with pytest.raises(ValueError, match=r"reward_entropy.* gave the reward nan to unit 0 of sample \d"):
        train_policy(settings())


def test_b22_one_token_answers_and_batches_of_one_stay_finite(settings):
    path = train_policy(settings(rollout_batch_size=1, max_new_tokens=1, action_rule="response"))
    rows = lines(path, "metrics.jsonl")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    weights = load_file(path / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_bfloat16_starts_on_policy(settings):
    row = lines(train_policy(settings(total_steps=1, bf16=True)), "metrics.jsonl")[0]
    assert row["kl/k1"] == pytest.approx(0, abs=1e-3) and row["policy/ratio_max"] == pytest.approx(1, abs=0.05)


def test_an_output_directory_with_another_run_is_left_alone(settings):
    path = train_policy(settings(total_steps=1))
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with pytest.raises(ValueError, match="already holds a run"):
        train_policy(settings())
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before
    train_policy(settings(total_steps=1, overwrite_output_dir=True))


def test_what_is_refused_leaves_no_trace(settings, tmp_path):
    """A bad pairing of models is refused before the directory is claimed or the run in it replaced."""
    with pytest.raises(ValueError, match="--reward_rule null"):
        train_policy(settings(reward_rule="token"))
    assert not (tmp_path / "run").exists()
    path = train_policy(settings(total_steps=1))
    with pytest.raises(ValueError, match="--reward_rule null"):
        train_policy(settings(reward_rule="token", overwrite_output_dir=True))
    assert len(lines(path, "metrics.jsonl")) == 1
    with pytest.raises(ValueError, match="no reward-model directory"):
        train_policy(settings(reward_model_path=str(tmp_path), overwrite_output_dir=True))
    with pytest.raises(ValueError, match="no such file"):
        train_policy(settings(dataset_name=str(tmp_path / "none.jsonl"), overwrite_output_dir=True))
    assert len(lines(path, "metrics.jsonl")) == 1


def test_what_was_read_left_out_and_cut_is_kept_with_the_run(settings, tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(20)] + [{"prompt": "question 3"}, {"prompt": "why " * 90}]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(total_steps=1, dataset_name=[str(path)], eval_dataset=str(path), eval_samples=2)
    with pytest.warns(UserWarning, match=r"of 21 evaluation prompts have a prompt that is trained on"):
        run = train_policy(config, DataOptions(stage_split="20,40,40"))
    record = json.loads((run / "data.json").read_text())
    training, evaluation = record["training"], record["evaluation"]
    assert (
        0
        < training["prompts"]
        == 21 - training["sources"][0]["skipped"]["in another stage"] - sum(training["fitted"].values())
    )
    assert evaluation["prompts"] == 20 and evaluation["sources"][0]["skipped"] == {"repeated prompt": 1}
    assert evaluation["fitted"] == {"prompts left out: longer than --max_prompt_length": 1}
    longer = train_policy(settings(total_steps=1, dataset_name=str(path), overlong="truncate_prompt_left",
                                   output_dir=str(tmp_path / "cut")))  # fmt: skip
    record = json.loads((longer / "data.json").read_text())["training"]
    assert record["prompts"] == 21 and record["fitted"] == {"prompts cut to --max_prompt_length": 1}


def test_a_run_of_another_stage_is_not_resumed(settings):
    config = settings(total_steps=1, save_steps=1)
    train_policy(config, DataOptions(stage_split="0,50,50"))
    again = settings(total_steps=2, resume_from_checkpoint="latest")
    with pytest.raises(ValueError, match=r"\(stage_split '0,50,50', now '50,0,50'\)"):
        train_policy(again, DataOptions(stage_split="50,0,50"))


def test_flags_reach_the_run(settings, capsys):
    config = settings(total_steps=1)
    flags = [
        word
        for name in ("model_name_or_path", "reward_model_path", "dataset_name", "output_dir", "total_steps",
                     "rollout_batch_size", "max_new_tokens", "max_prompt_length")
        for word in (f"--{name}", str(getattr(config, name)))
    ]  # fmt: skip
    main(flags)
    assert len(lines(Path(config.output_dir), "metrics.jsonl")) == 1


def test_rloo_is_named_in_its_bar_and_its_record(settings, capsys):
    config = settings(total_steps=1)
    names = ("model_name_or_path", "reward_model_path", "dataset_name", "output_dir", "total_steps")
    flags = [word for name in names for word in (f"--{name}", str(getattr(config, name)))]
    rloo.main([*flags, "--rollout_batch_size", "4", "--max_new_tokens", "4", "--num_samples_per_prompt", "2"])
    said = capsys.readouterr().err
    assert "RLOO" in said and "PPO" not in said
    assert json.loads((Path(config.output_dir) / "run.json").read_text())["command"] == "rloo"


def test_a_released_convention_runs(settings):
    path = train_policy(settings("released", action_rule="entropy", total_steps=1))
    assert math.isfinite(lines(path, "metrics.jsonl")[0]["reward/dense_sum"])


@pytest.mark.filterwarnings("ignore:.*is read as an ordinary .bandit. reward model:UserWarning")
def test_a_reward_model_of_another_program_gives_its_score_at_the_end(settings, reward_dirs, tmp_path):
    """Without segrew.json it is bandit PPO, and the reference cuts where actions need a model."""
    stock = shutil.copytree(reward_dirs["response"], tmp_path / "stock")
    (stock / "segrew.json").unlink()
    (stock / "normalizer.json").unlink()
    flags = {"reward_rule": "terminal", "action_rule": "entropy", "entropy_threshold": 5.2, "total_steps": 1}
    paths = [
        train_policy(settings("response", output_dir=str(tmp_path / name), reward_model_path=str(path), **flags))
        for name, path in (("ours", reward_dirs["response"]), ("theirs", stock))
    ]
    one, other = (lines(path, "metrics.jsonl")[0]["reward/score"] for path in paths)
    assert one == pytest.approx(other, abs=1e-6)
