"""Options of a run on a tiny model: what keeps PPO alive, where rewards come from, and exact resume with state."""

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import policy.ppo as ppo
import policy.update as update_module
from policy.ppo import train_policy
from policy.ppo_run import open_run
from reward_models import SegmentRewardModel
from reward_models.reading import Readings
from segrew.language_models import load_causal_lm

REWARDS = """
import math

CALLS = []

def level(prompts, completions, level, **columns):
    assert len(prompts) == len(completions) == len(level) == len(columns["segments"])
    CALLS.append(list(zip([p[-1]["content"] for p in prompts], level)))
    return [len(text) + 10 * k for text, k in zip(completions, level)]

def dense(prompts, completions, completion_ids):
    return [[0.5] * len(ids) for ids in completion_ids]

def by_segment(prompts, completions, segments):
    return [[1.0] * len(texts) for texts in segments]

def falling(prompts, completions):
    CALLS.append(None)
    return [-float(len(CALLS))] * len(completions)

def best_second(prompts, completions):
    CALLS.append(None)
    return [-abs(len(CALLS) - 2.0)] * len(completions)

def constant(prompts, completions):
    return [1.0] * len(completions)

def fails(prompts, completions):
    raise RuntimeError("no such scorer")


def one_bad(prompts, completions):
    return [1.0, None, math.nan, math.inf, 2.0, 3.0][: len(completions)]

def none(prompts, completions):
    return [None] * len(completions)
"""


def lines(path: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, b[name]) for name, weight in a.items())


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A module of reward functions, under a name of this test's own."""
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def leveled_prompts(tmp_path):
    path = tmp_path / "leveled.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Go {k}.", "level": k}) + "\n" for k in range(4)))
    return str(path)


def test_functions_alone_reward_with_the_columns_of_the_data(settings, rewards, leveled_prompts):
    config = settings(
        reward_model_path="", reward_functions=[f"{rewards}:level"], dataset_name=leveled_prompts, reward_clip=100.0,
        advantage_estimator="rloo", num_samples_per_prompt=3, action_rule="response", whitening="none",
    )  # fmt: skip
    path = train_policy(config)
    calls = __import__(rewards).CALLS
    assert all(prompt == f"Go {level}." for call in calls for prompt, level in call)
    assert all(call[:3] == [call[0]] * 3 and call[3:] == [call[3]] * 3 for call in calls)
    rows, samples = lines(path, "metrics.jsonl"), lines(path, "samples.jsonl")
    assert rows[0]["units/count"] == rows[0]["actions/count"] == 1 and rows[0]["value/loss"] == 0.0
    for row in samples:
        level = int(row["prompt"][3:-1])
        assert row["score"] == pytest.approx(len(row["response"]) + 10 * level)
    assert json.loads((path / "settings.json").read_text())["reward_sources"] == [f"{rewards}:level"]


def test_programs_are_rewarded_by_running_them_and_only_by_permission(settings, tmp_path):
    path = tmp_path / "problems.jsonl"
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    path.write_text("".join(json.dumps({"prompt": f"Go {k}.", "tests": tests}) + "\n" for k in range(4)))
    flags = {
        "reward_model_path": "", "reward_functions": ["code"], "dataset_name": str(path), "total_steps": 1,
        "advantage_estimator": "rloo", "num_samples_per_prompt": 2, "rollout_batch_size": 4, "samples_per_step": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match="allow_code_execution"):
        settings(**flags)
    samples = lines(train_policy(settings(**flags, allow_code_execution=True)), "samples.jsonl")
    for sample in samples:  # what a tiny model babbles is no Python, or prints no 2
        try:
            compile(sample["response"], "answer", "exec")
            assert sample["score"] > -1
        except (SyntaxError, ValueError):
            assert sample["score"] == -1


def test_a_run_that_fails_before_its_first_step_leaves_no_directory(settings, rewards, tmp_path):
    for failing, message in (
        ({"reward_functions": [f"{rewards}:fails"], "reward_model_path": ""}, "fails raised RuntimeError"),
        ({"use_peft": True, "lora_target_modules": ["nowhere"]}, "nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            train_policy(settings(**failing))
        assert not (tmp_path / "run").exists()
    path = train_policy(settings(total_steps=1, save_steps=1))
    with pytest.raises(ValueError, match="nowhere"):
        train_policy(settings(use_peft=True, lora_target_modules=["nowhere"], overwrite_output_dir=True))
    assert len(lines(path, "metrics.jsonl")) == 1


def test_b37_a_policy_with_tied_embeddings_is_saved_once_and_still_tied(settings, policy_dir, tmp_path):
    config = AutoConfig.from_pretrained(policy_dir, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(policy_dir).save_pretrained(tmp_path / "tied")
    common = {"model_name_or_path": str(tmp_path / "tied"), "normalizer": "none", "total_steps": 1, "save_steps": 1}
    path = train_policy(settings("token", **common))
    saved, start = weights(path), weights(tmp_path / "tied")
    assert "lm_head.weight" not in saved and same(saved, weights(path / "checkpoint-1"))
    assert not torch.equal(saved["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])


def test_b38_the_schedule_counts_updates_and_not_micro_batches(settings, monkeypatch):
    """Three steps of three micro-batches each; a skipped update does not move it."""
    used = []
    step = torch.optim.AdamW.step

    def spied(optimizer, *rest, **options):
        used.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *rest, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    common = {"lr_scheduler_type": "linear", "total_steps": 3, "per_device_train_batch_size": 2}
    train_policy(settings(**common))
    assert used == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    used.clear()
    finite = iter([True, False, True])
    monkeypatch.setattr("policy.update.all_finite", lambda norms: next(finite))
    train_policy(settings(**common, skip_bad_rows=True, overwrite_output_dir=True))
    assert used == pytest.approx([1e-3, 2e-3 / 3])


def test_sources_add_up_with_their_weights(settings, rewards, reward_dirs):
    names = [f"{rewards}:{name}" for name in ("dense", "by_segment")]
    config = settings(
        extra_reward_models=[str(reward_dirs["entropy"])], reward_functions=names, reward_weights=[1.0, -1.0, 2.0, 0.0],
        total_steps=1, kl_coef=0.0,
    )  # fmt: skip
    path = train_policy(config)
    (row,) = lines(path, "metrics.jsonl")
    # The reward model less itself leaves 2 · 0.5 a token.
    assert row["reward/dense_sum"] == pytest.approx(row["response/length"], abs=1e-4)
    assert row[f"reward/{names[1]}"] == pytest.approx(row["units/count"])
    assert row["reward/score"] == pytest.approx(row["response/length"], abs=1e-4)
    for sample in lines(path, "samples.jsonl"):
        assert set(sample["sources"]) == {str(reward_dirs["entropy"]), *names}


def test_a_run_may_be_paid_by_a_model_that_reads_text(settings, tmp_path):
    rows = []
    for kind in ("ids", "text"):
        path = train_policy(settings(reward_tokens=kind, total_steps=1, output_dir=str(tmp_path / kind)))
        rows += lines(path, "metrics.jsonl")
    # Sampled bytes that are no text do not survive the way over text, so only what both read is compared.
    assert rows[0]["response/length"] == rows[1]["response/length"]
    assert all(math.isfinite(value) for value in rows[1].values())


def test_evaluators_are_logged_and_never_optimized(settings, rewards, reward_dirs, prompts_file, tmp_path):
    common = {"eval_dataset": str(prompts_file), "eval_steps": 1}
    plain = train_policy(settings(output_dir=str(tmp_path / "plain"), **common))
    gold, falling = str(reward_dirs["response"]), f"{rewards}:falling"
    judged = train_policy(
        settings(
            output_dir=str(tmp_path / "judged"), eval_reward_models=[gold], eval_reward_functions=[falling], **common
        )
    )
    assert same(weights(plain), weights(judged))
    found = lines(judged, "evaluation.jsonl")
    assert [row["step"] for row in found] == [0, 1, 2]
    assert [row["evaluators"][falling] for row in found] == [[-k] * 5 for k in (1.0, 2.0, 3.0)]
    model = SegmentRewardModel.from_pretrained(gold, device=torch.device("cpu"))
    sample = next(row for row in lines(judged, "samples.jsonl") if row["split"] == "eval")
    prompt = [{"role": "user", "content": sample["prompt"]}]
    assert len(found[0]["evaluators"][gold]) == 5
    assert model.score([prompt], [sample["response"]])  # it reads any text
    steps = lines(judged, "metrics.jsonl")
    assert steps[1][f"eval/{falling}"] == -3.0 and steps[1]["eval/score"] == pytest.approx(found[2]["score"])


def test_a_proxy_that_rises_while_the_evaluator_falls_is_reported(settings, rewards, prompts_file, monkeypatch):
    """The policy stays as it is; the held-out score is made to rise."""
    read, calls = SegmentRewardModel.read, []

    def rising(self, conversations, segmentation, outputs):
        calls.append(None)
        found = read(self, conversations, segmentation, outputs)
        return Readings(found.rewards, found.scores + 0.1 * len(calls))

    monkeypatch.setattr(SegmentRewardModel, "read", rising)
    config = settings(
        eval_dataset=str(prompts_file), eval_steps=1, eval_reward_functions=[f"{rewards}:falling"], learning_rate=0.0
    )
    with pytest.warns(UserWarning, match=r"reward hacking\? At step 1 .*falling fell"):
        train_policy(config)


def test_a_constant_reward_is_reported_and_early_stopping_ends_the_run(settings, rewards, prompts_file):
    config = settings(
        reward_model_path="", reward_functions=[f"{rewards}:constant"], eval_dataset=str(prompts_file), eval_steps=1,
        early_stopping_patience=2, total_steps=9, kl_coef=0.0, num_samples_per_prompt=2,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="100% of the prompts all answers"):
        path = train_policy(config)
    assert [row["step"] for row in lines(path, "metrics.jsonl")] == [1, 2]
    assert (path / "model.safetensors").exists()
    for name in ("eval/gold", "eval/repetition"):
        with pytest.raises(ValueError, match=rf"--metric_for_best_model {name}: more is better of eval/score"):
            train_policy(
                settings(
                    eval_dataset=str(prompts_file), early_stopping_patience=1, metric_for_best_model=name,
                    overwrite_output_dir=True,
                )
            )  # fmt: skip


@pytest.mark.parametrize("lora", [True, False])
def test_early_stopping_ends_with_the_policy_of_the_best_evaluation(settings, rewards, prompts_file, tmp_path, lora):
    """The second evaluation of four is the best: the policy after step 1, which checkpoint-1 holds too."""
    path = train_policy(
        settings(
            use_peft=lora, learning_rate=1e-2, total_steps=9, save_steps=1, save_total_limit=None, eval_steps=1,
            eval_dataset=str(prompts_file), eval_reward_functions=[f"{rewards}:best_second"],
            metric_for_best_model=f"eval/{rewards}:best_second", early_stopping_patience=2,
        )
    )  # fmt: skip
    assert [row["step"] for row in lines(path, "metrics.jsonl")] == [1, 2, 3]
    assert [found.name for found in path.glob("best-*")] == ["best-1"]
    ended = load_causal_lm(str(path), dtype=torch.float32).state_dict()
    for step, is_best in ((1, True), (3, False)):
        kept = load_causal_lm(str(path / f"checkpoint-{step}"), dtype=torch.float32).state_dict()
        assert same(ended, kept) == is_best


def test_b23_bad_rows_are_masked_and_counted_or_end_the_run(settings, rewards, policy_dir):
    """None, NaN and +inf among six answers; then no reward at all, which moves nothing."""
    common = {"reward_model_path": "", "total_steps": 1}
    message = r"one_bad gave the reward nan to unit 0 of sample 1 .*return a number there, or pass --skip_bad_rows true"
    with pytest.raises(ValueError, match=message):
        train_policy(settings(reward_functions=[f"{rewards}:one_bad"], **common))
    path = train_policy(
        settings(reward_functions=[f"{rewards}:one_bad"], skip_bad_rows=True, overwrite_output_dir=True, **common)
    )
    (row,) = lines(path, "metrics.jsonl")
    assert row["reward/bad_rows"] == 3 and row["reward/score"] == pytest.approx(2.0)
    assert not same(weights(path), load_file(policy_dir / "model.safetensors"))
    path = train_policy(
        settings(
            reward_functions=[f"{rewards}:none"], skip_bad_rows=True, overwrite_output_dir=True, num_mini_batches=2,
            **common,
        )
    )  # fmt: skip
    (row,) = lines(path, "metrics.jsonl")
    assert row["reward/bad_rows"] == 6 and row["policy/updates"] == 0 and row["reward/score"] == 0.0
    assert same(weights(path), load_file(policy_dir / "model.safetensors"))


def test_held_out_answers_without_a_score_are_in_no_mean(settings, rewards, prompts_file):
    path = train_policy(
        settings(
            reward_model_path="", reward_functions=[f"{rewards}:one_bad"], skip_bad_rows=True, total_steps=0,
            eval_dataset=str(prompts_file), eval_reward_functions=[f"{rewards}:one_bad", f"{rewards}:none"],
        )
    )  # fmt: skip
    (row,) = lines(path, "evaluation.jsonl")
    assert row["scores"] == row["evaluators"][f"{rewards}:one_bad"] == [1.0, None, None, None, 2.0]
    assert row["score"] == row["metrics"][f"eval/{rewards}:one_bad"] == pytest.approx(1.5)
    assert row["evaluators"][f"{rewards}:none"] == [None] * 5


def broken_losses(row: int):
    """The losses with an infinite gradient for one row of the rollouts."""
    whole = update_module.losses

    def losses(run, rollout, experience, rows, sizes, **options):
        for loss, stats in whole(run, rollout, experience, rows, sizes, **options):
            if row in rows:
                weight = next(run.policy.parameters())
                loss = loss + (weight * torch.inf).sum()
            yield loss, stats

    return losses


def test_a_gradient_that_is_not_finite_names_its_row_or_is_skipped(settings, monkeypatch):
    """B23, B38: nothing is updated, and a skipped update does not advance the schedule."""
    monkeypatch.setattr(update_module, "losses", broken_losses(4))
    common = {"num_mini_batches": 3, "total_steps": 1, "lr_scheduler_type": "linear", "save_steps": 1}
    with pytest.raises(ValueError, match=r"a gradient is NaN or infinite \(row 4 of this step"):
        train_policy(settings(**common))
    path = train_policy(settings(skip_bad_rows=True, overwrite_output_dir=True, **common))
    (row,) = lines(path, "metrics.jsonl")
    assert row["policy/updates"] == 2 and row["policy/skipped_updates"] == 1
    saved = torch.load(path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert saved["scheduler"]["last_epoch"] == 2
    assert all(weight.isfinite().all() for weight in weights(path).values())


def test_only_the_critic_learns_while_it_warms_up(settings, policy_dir):
    common = {"critic_warmup_steps": 2, "save_steps": 1, "weight_decay": 0.1}
    path = train_policy(settings(**common))
    assert same(weights(path), load_file(policy_dir / "model.safetensors"))
    one, two = (load_file(path / f"checkpoint-{k}" / "critic.safetensors") for k in (1, 2))
    assert not same(one, two)
    rows = lines(path, "metrics.jsonl")
    assert rows[1]["value/grad_norm"] > 0 == rows[1]["policy/grad_norm"]
    path = train_policy(settings(overwrite_output_dir=True, **common | {"total_steps": 3}))
    assert not same(weights(path), load_file(policy_dir / "model.safetensors"))


def test_rollouts_are_used_up_once_the_policy_has_moved_too_far(settings):
    common = {"num_ppo_epochs": 4, "total_steps": 1, "learning_rate": 1e-2}
    (row,) = lines(train_policy(settings(**common)), "metrics.jsonl")
    assert row["policy/updates"] == 4 and row["policy/approx_kl"] > 1e-3
    for bound in ({"target_kl": 1e-4}, {"ratio_threshold": 1.01}):
        path = train_policy(settings(overwrite_output_dir=True, **common, **bound))
        (row,) = lines(path, "metrics.jsonl")
        assert row["policy/updates"] == 1  # the first: there π is still π_old


def test_the_kl_may_go_to_the_loss(settings):
    config = settings(kl_in="loss", kl_estimator="k3", kl_coef=1.0, num_ppo_epochs=2)
    rows = lines(train_policy(config), "metrics.jsonl")
    assert rows[1]["policy/kl_loss"] > 0
    assert rows[1]["reward/dense_sum"] != 0.0


def test_n_and_actions_change_with_the_schedule(settings):
    path = train_policy(settings(action_rule="ngram", n_schedule="5:0,2:2", max_new_tokens=11))
    first, second = lines(path, "metrics.jsonl")
    assert first["actions/length"] > 2.5 > second["actions/length"]


def test_sampling_that_log_probabilities_do_not_describe_is_reported(settings):
    with pytest.warns(UserWarning, match=r"--top_k 4 and --top_p 0.9: .* do not describe the samples"):
        train_policy(settings(top_k=4, top_p=0.9, total_steps=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train_policy(settings(total_steps=1, overwrite_output_dir=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 20, "critic_target": "unit",
            "truncated_answers": "bootstrap", "action_rule": "entropy", "value_scheme": "decayed", "whitening": "unit",
            "critic_warmup_steps": 1, "target_kl": 0.5, "cliprange_high": 0.3, "dual_clip": 3.0, "num_ppo_epochs": 2,
        },
        {
            "advantage_estimator": "group", "num_samples_per_prompt": 3, "kl_in": "loss", "kl_estimator": "k2",
            "kl_scale": "unit", "action_rule": "ngram", "n_schedule": "4:0,2:3", "truncated_answers": "mask",
        },
        {"compat": "ma_rlhf_release", "action_rule": "ngram", "n": 3, "reward_rule": "terminal", "whitening": "none"},
    ],
    ids=["adaptive", "group", "compat"],
)  # fmt: skip
def test_a_killed_and_resumed_run_is_exact_with_every_state(settings, prompts_file, monkeypatch, tmp_path, options):
    common = {
        "total_steps": 4, "save_steps": 2, "eval_dataset": str(prompts_file), "eval_steps": 1,
        "early_stopping_patience": 9, **options,
    }  # fmt: skip
    whole = train_policy(settings(output_dir=str(tmp_path / "whole"), **common))
    with monkeypatch.context() as patch:
        report = ppo.report

        def killed(run, metrics):
            report(run, metrics)
            if metrics["step"] == 3:
                raise KeyboardInterrupt

        patch.setattr(ppo, "report", killed)
        with pytest.raises(KeyboardInterrupt):
            train_policy(settings(output_dir=str(tmp_path / "killed"), **common))
    resumed = train_policy(settings(output_dir=str(tmp_path / "killed"), resume_from_checkpoint="latest", **common))
    assert same(weights(whole), weights(resumed))
    assert lines(whole, "evaluation.jsonl") == lines(resumed, "evaluation.jsonl")
    coefficients = [row["kl/coef"] for row in lines(whole, "metrics.jsonl")]
    assert coefficients == [row["kl/coef"] for row in lines(resumed, "metrics.jsonl")]
    assert (len(set(coefficients)) > 1) == ("kl_controller" in options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 480}, r"prompts.jsonl.*with its answers, the policy's context has 512; lower"),
        ({"stop_token_ids": [2, 259, 400]}, r"--stop_token_ids \[259, 400\]: the tokenizer has the ids 0 to 258"),
    ],
)
def test_answers_without_room_and_unknown_stop_tokens_are_refused_before_anything_is_written(
    settings, changes, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        train_policy(settings(**changes))
    assert not (tmp_path / "run").exists()


def test_a_reward_model_without_room_is_refused_too(settings, reward_dirs, tmp_path):
    small = shutil.copytree(reward_dirs["response"], tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    for paths in ({"reward_model_path": str(small)}, {"extra_reward_models": [str(small)], "normalizer": "none"}):
        with pytest.raises(ValueError, match=r"the reward model .*small's context has 32"):
            train_policy(settings(**paths))
    assert not (tmp_path / "run").exists()


def test_liger_kernels_reach_every_model_of_a_run(settings, monkeypatch, reward_dirs, prompts_file):
    given, further = [], str(reward_dirs["response"])
    with pytest.raises(ValueError, match="--use_liger_kernel true"):
        settings(use_liger_kernel=True)
    monkeypatch.setattr("policy.ppo_checks.check_liger_kernel", lambda: None)
    monkeypatch.setattr("policy.ppo_run.apply_liger_kernel", lambda *models: given.extend(models))
    judged = {"eval_dataset": str(prompts_file), "eval_reward_models": [further]}
    run, _ = open_run(settings(use_liger_kernel=True, extra_reward_models=[further], normalizer="none", **judged))
    roles, scorers = run.roles, [source.model.model for source in [*run.sources, *run.evaluators]]
    expected = [roles.policy.model, roles.reference, roles.critic.trunk, roles.segmenter, *scorers]
    assert all(a is b for a, b in zip(given, expected, strict=True)) and given[0] is not None
    assert len(scorers) == 3 and scorers[0] is roles.reward_model.model
