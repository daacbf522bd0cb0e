"""Held-out answers are scored on the very tokens that were drawn, and two evaluations of a run are paired."""

import json

import pytest
import torch

from policy import held_out
from policy.held_out import evaluate, should_stop
from policy.ppo_run import open_run


@pytest.fixture
def run(settings, prompts_file):
    return open_run(settings(eval_dataset=str(prompts_file), eval_samples=4, samples_per_step=9))[0]


def lines(run, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.directory.path / name).read_text().splitlines()]


def test_scores_are_means_of_the_segments_that_tile_the_answer(run):
    metrics = evaluate(run, 0)
    (record,) = lines(run, "evaluation.jsonl")
    samples = lines(run, "samples.jsonl")
    assert len(samples) == len(record["scores"]) == 4
    for sample, score in zip(samples, record["scores"], strict=True):
        assert sample["split"] == "eval" and sample["score"] == score
        assert "".join(segment["text"] for segment in sample["segments"]) == sample["response"]
        rewards = [segment["reward"] for segment in sample["segments"]]
        assert score == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
    assert metrics["eval/score"] == record["score"] == pytest.approx(sum(record["scores"]) / 4)


def test_evaluations_draw_with_the_same_random_numbers_whatever_the_global_state(run):
    evaluate(run, 0)
    torch.rand(3)
    evaluate(run, 1)
    first, second = lines(run, "evaluation.jsonl")
    assert first["scores"] == second["scores"]
    answers = [[s["response"] for s in lines(run, "samples.jsonl") if s["step"] == step] for step in (0, 1)]
    assert answers[0] == answers[1]


def test_held_out_prompts_are_cut_like_those_of_training(settings, prompts_file, monkeypatch):
    cut = {"overlong": "truncate_prompt_left", "max_prompt_length": 12}
    run, _ = open_run(settings(eval_dataset=str(prompts_file), **cut))
    seen = []
    sample = held_out.sample_answers
    monkeypatch.setattr(
        held_out,
        "sample_answers",
        lambda m, c, prompts, *a, **k: seen.extend(prompts) or sample(m, c, prompts, *a, **k),
    )
    evaluate(run, 0)
    assert seen == run.prompt_ids and {len(ids) for ids in seen} == {12}


def test_a_run_without_held_out_prompts_is_not_evaluated(settings):
    run, _ = open_run(settings())
    assert evaluate(run, 0) == {} and not (run.directory.path / "evaluation.jsonl").exists()
    assert not should_stop(run, 1)
