"""Answers to held-out prompts during a run, read by its sources of reward and by evaluators it never optimizes."""

from typing import Any

import torch

from policy.minibatches import step_generator
from policy.monitors import best_of, hacking_warning, mean_given, out_of_patience
from policy.ppo_run import Run, save_best
from policy.readings import Answered, Reading
from policy.reward_sources import read_rewards
from policy.rollout import sample_answers
from policy.samples import sample_rows
from policy.scoring import cut_units
from policy.text_metrics import repetition
from segrew import processes


@torch.no_grad()
def evaluate(run: Run, step: int) -> dict[str, float]:
    """Answer the evaluation prompts, score the answers, and warn of reward hacking; {} without such prompts.

    Each evaluation draws with the same random numbers, which makes two of them paired. Answers without a finite score
    are null there and in no mean.
    """
    if not run.eval_prompts:
        return {}
    run.show("evaluation")
    lines = processes.gather_list(_score_own_prompts(run, step))
    scores = [line["score"] for line in lines]
    evaluators = {source.name: [line["evaluators"][source.name] for line in lines] for source in run.evaluators}
    repeated = mean_given([line["repetition"] for line in lines])
    metrics = {"eval/score": mean_given(scores), "eval/repetition": repeated}
    metrics |= {f"eval/{name}": mean_given(found) for name, found in evaluators.items()}
    record = {
        "step": step, "score": metrics["eval/score"], "scores": scores, "evaluators": evaluators,
        "repetition": repeated, "metrics": metrics,
    }  # fmt: skip
    watched = run.config.metric_for_best_model
    rising = sorted(metrics.keys() - {"eval/repetition"})
    if run.config.early_stopping_patience is not None and watched not in rising:
        raise ValueError(f"--metric_for_best_model {watched}: more is better of {', '.join(rising)}.")
    run.evaluations.append(record)
    if run.config.early_stopping_patience is not None and run.evaluations[best_of(run.evaluations, watched)] is record:
        save_best(run, step)
    if processes.is_main():
        run.directory.append("evaluation.jsonl", record)
        for line in lines[: run.config.samples_per_step]:
            run.directory.append("samples.jsonl", line["sample"])
    run.warn_once("hacking", hacking_warning(run.evaluations))
    return metrics


def _score_own_prompts(run: Run, step: int) -> list[dict[str, Any]]:
    """Answer and score this process's share of the evaluation prompts."""
    config, roles, accelerator = run.config, run.roles, run.accelerator
    shared = processes.share(run.eval_prompts)
    if not shared:
        return []
    generator = step_generator(config.seed, 0, -2)
    own, prompts = [prompt for prompt, _ in shared], [ids for _, ids in shared]
    with accelerator.autocast():
        policy = roles.policy.eval().model
        answers = sample_answers(policy, roles.chat, prompts, config.sampling, generator, engine=run.engine)
        answered = Answered(own, answers.conversations, answers.texts)
        units = cut_units(answers.conversations, roles, run.axes.at(step), config, generator)
        scores = read_rewards(run.sources, config.reward_weights, answered, units, skip_bad=config.skip_bad_rows)
        judged = {e.name: _given(e.read(answered, units)) for e in run.evaluators}
    bad = scores.bad.tolist()
    samples = sample_rows(step, "eval", answered, scores, run.sources, roles.chat, len(own))
    return [
        {
            "score": None if bad[i] else line["score"],
            "sample": line,
            "repetition": repetition(answers.conversations.responses[i]),
            "evaluators": {name: values[i] for name, values in judged.items()},
        }
        for i, line in enumerate(samples)
    ]


def _given(reading: Reading) -> list[float | None]:
    """The scores of a reading, None where there is no finite one."""
    return [None if bad else x for x, bad in zip(reading.scores.tolist(), reading.bad.tolist(), strict=True)]


def should_stop(run: Run, step: int) -> bool:
    """Whether held-out answers have long enough not got better."""
    patience = run.config.early_stopping_patience
    if patience is None or not run.evaluations or run.evaluations[-1]["step"] != step:
        return False
    stops = out_of_patience(run.evaluations, run.config.metric_for_best_model, patience)
    if stops:
        run.show(f"stopped: {run.config.metric_for_best_model} no better for {patience} evaluations")
    return stops
