"""Two processes over gloo equal one: on the same answers, in everything that is learnt and reported."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import policy.ppo as ppo
from policy.ppo_config import PPOConfig

ROOT = Path(__file__).parents[2]
PROMPTS = [f"Name {what}." for what in ("a colour", "two rivers", "a", "an old city in Europe", "it", "a tree", "us")]
# Micro-batches and processes differ, and with them clocks, memory and the noise between micro-batches.
OWN = ("time/", "memory/", "tokens_per_second", "gradient/relative_variance")
FUNCTION = """
import json, os
def brevity(prompts, completions, **_):
    with open(f"calls-{os.environ.get('RANK', 'alone')}.jsonl", "a") as file:
        file.writelines(json.dumps([p[-1]["content"], c]) + "\\n" for p, c in zip(prompts, completions))
    return [None if len(c) % 5 == 0 else -len(c) / 10 for c in completions]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch, policy_dir, reward_dirs):
    """Runs of one process, then in one launch of two: the same by name, on the answers that the first ones drew."""
    path, replay = tmp_path_factory.mktemp("processes"), runpy.run_path(str(ROOT / "tests/policy/replay.py"))
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (path / "my_rewards.py").write_text(FUNCTION)
    shared = {"model_name_or_path": str(policy_dir), "dataset_name": "prompts.jsonl", "max_new_tokens": 10}
    shared |= {"max_prompt_length": 128, "learning_rate": 1e-4, "critic_learning_rate": 1e-4, "save_steps": 0}
    shared |= {"per_device_train_batch_size": 2, "bf16": False, "total_steps": 2, "overwrite_output_dir": True}
    model = {"reward_model_path": str(reward_dirs["entropy"])}
    uneven = {"rollout_batch_size": 7, "action_rule": "ngram", "n": 3, "num_mini_batches": 2, "num_ppo_epochs": 2}
    settings = {
        "uneven": model | uneven | {"kl_controller": "adaptive", "kl_horizon": 10, "target_kl": 1e-5},
        "groups": {
            "reward_functions": ["my_rewards:brevity"], "action_rule": "response",
            "advantage_estimator": "rloo", "num_samples_per_prompt": 3, "rollout_batch_size": 9, "whitening": "unit",
            "use_peft": True, "skip_bad_rows": True, "truncated_answers": "mask", "kl_in": "loss", "kl_estimator": "k2",
            "critic_warmup_steps": 0,
        },
        "one_row": model | {"rollout_batch_size": 1, "critic_warmup_steps": 1, "whitening": "none"},
        "live": model | {"rollout_batch_size": 5, "eval_dataset": "prompts.jsonl", "eval_samples": 3},
        "begun": model | {"rollout_batch_size": 5, "total_steps": 1, "save_steps": 1},
        "goes_on": model | {"rollout_batch_size": 5, "output_dir": "two/begun", "resume_from_checkpoint": "latest"},
    }  # fmt: skip
    answers: dict[str, dict] = {"uneven": {}, "groups": {}, "one_row": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name, drawn in answers.items():
            with replay["replayed"](drawn):
                ppo.train_policy(PPOConfig(**shared | settings[name] | {"output_dir": f"one/{name}"}))
    files = []
    for name, own in settings.items():
        files.append(path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(shared | {"output_dir": f"two/{name}"} | own))
    (path / "answers.json").write_text(json.dumps(answers))
    done = launch(path, ROOT / "tests/policy/replay.py", path / "answers.json", *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_own(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(OWN)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "groups", "one_row"])
def test_metrics_and_weights_equal_those_of_one_process(runs, policy_dir, name):
    """Seven prompts over two processes; three prompts of three answers each; one row, so that one process has none."""
    one, two = (rows(runs / of / name / "metrics.jsonl") for of in ("one", "two"))
    assert len(one) == len(two) == 2
    for alone, together in zip(one, two, strict=True):
        assert without_own(together) == pytest.approx(without_own(alone), abs=1e-5, rel=1e-5)
    start = load_file(policy_dir / "model.safetensors")
    alone, together = (load_file(runs / of / name / "model.safetensors") for of in ("one", "two"))
    assert max((alone[weight] - start[weight]).abs().max() for weight in start) > 5e-5  # it has learnt something
    for weight in alone:
        torch.testing.assert_close(together[weight], alone[weight], atol=1e-5, rtol=0)
    samples = [rows(runs / of / name / "samples.jsonl") for of in ("one", "two")]
    assert [row["response"] for row in samples[0]] == [row["response"] for row in samples[1]]


@pytest.mark.slow
def test_a_reward_function_is_called_once_for_each_answer(runs):
    alone, first, second = (rows(runs / f"calls-{name}.jsonl") for name in ("alone", 0, 1))
    assert len(alone) == 2 * 9 and sorted(first + second) == sorted(alone) and len(first) == 2 * 6
    assert {call[0] for call in first[:6]}.isdisjoint(
        call[0] for call in second[:3]
    )  # answers to a prompt stay together


@pytest.mark.slow
def test_two_live_processes_evaluate_each_prompt_once_and_resume_to_the_same_bits(runs):
    whole, parts = (runs / "two" / name for name in ("live", "begun"))
    assert [without_own(row) for row in rows(parts / "metrics.jsonl")][1:] == [
        {name: value for name, value in without_own(row).items() if not name.startswith("eval/")}
        for row in rows(whole / "metrics.jsonl")
    ][1:]
    one, two = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)
    evaluations = rows(whole / "evaluation.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2]
    assert all(len(record["scores"]) == 3 for record in evaluations)
    prompts = [row["prompt"] for row in rows(whole / "samples.jsonl") if row["split"] == "eval"]
    assert prompts == PROMPTS[:3] * 2
