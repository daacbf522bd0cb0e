"""One update of `segrew ppo` beside TRL's PPOTrainer: seconds by phase, and peak memory.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.12.0 peft     # the newest release that still has it
    python benchmarks/ppo_vs_trl.py --peer_python /tmp/trl/bin/python --dataset hh.jsonl --tune lora

Both sides start from the same policy, critic trunk and reward model (read once, at the stop token), sample as many
tokens at temperature 1 from the same prompts and take one optimizer step on all of them, without activation
checkpointing. With --tune lora TRL trains an adapter on the policy and, having nothing else, all weights of its critic.
With bfloat16, TRL holds every model in bfloat16, as its own script does; segrew keeps trained weights in float32.
Memory is the peak of each process over what it held after its imports. Prints a table and writes a line of --output.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import Results, clock, median, memory_of_imports, met, model_for, parse, ratio, spent, take_turns, timed

SEED, LORA = 0, 16
TARGETS = {"lora": 0.5, "full": 0.8}


def measure_trl(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    seconds: dict[str, float] = {}
    before = memory_of_imports()
    set_seed(SEED)
    dtype, lora = getattr(torch, job["dtype"]), job["tune"] == "lora"
    with clock(seconds, "load"):
        policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        reference = None if lora else AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        reward, critic = (
            AutoModelForSequenceClassification.from_pretrained(job["reward_model"], num_labels=1, dtype=dtype)
            for _ in range(2)
        )
        tokenizer = AutoTokenizer.from_pretrained(job["reward_model"], padding_side="left")
    data = Dataset.from_list([{"input_ids": ids} for ids in job["prompts"]])
    arguments = PPOConfig(
        output_dir=job["output"], total_episodes=len(data), num_ppo_epochs=1, num_mini_batches=1,
        per_device_train_batch_size=job["batch"], gradient_accumulation_steps=len(data) // job["batch"],
        local_rollout_forward_batch_size=job["rollout_batch"], response_length=job["tokens"], temperature=1.0,
        stop_token="eos", num_sample_generations=0, learning_rate=1e-6, kl_coef=0.05, seed=SEED, use_cpu=True,
        bf16=job["dtype"] == "bfloat16", gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=critic, train_dataset=data, eval_dataset=data,
        peft_config=LoraConfig(r=LORA, lora_alpha=2 * LORA, target_modules="all-linear", task_type="CAUSAL_LM")
        if lora else None,
    )  # fmt: skip
    drawn: list[int] = []
    generate, run_model = ppo_trainer.batch_generation, ppo_trainer.forward
    try:
        ppo_trainer.batch_generation = lambda *a: count_tokens(generate(*a), a[1].shape[1], tokenizer, drawn)
        timed(seconds, "rollout", ppo_trainer, "batch_generation")
        timed(seconds, "score and value", ppo_trainer, "get_reward")
        timed(seconds, "update", trainer.accelerator, "backward")

        def passes(*args: Any) -> Any:
            with clock(seconds, "update" if torch.is_grad_enabled() else "reference"):
                return run_model(*args)

        ppo_trainer.forward = passes
        with clock(seconds, "step"):
            trainer.train()
    finally:
        ppo_trainer.batch_generation, ppo_trainer.forward = generate, run_model
    log = next(entry for entry in trainer.state.log_history if "objective/kl" in entry)
    found = {"kl": log["objective/kl"], "score": log["objective/scores"], "answer_tokens": sum(drawn)}
    return result_of(seconds, found) | spent(seconds, before, "trl", "transformers", "torch")


def count_tokens(found: Any, prompt_width: int, tokenizer: Any, drawn: list[int]) -> Any:
    """Note how long TRL's answers are, up to and including the stop token."""
    answers = found[0][:, prompt_width:]
    ended = (answers == tokenizer.eos_token_id).cumsum(1).bool()
    drawn.extend(((~ended).sum(1) + ended.any(1)).tolist())
    return found


def measure_segrew(job: dict[str, Any]) -> dict[str, Any]:
    from policy import ppo
    from policy.ppo_config import PPOConfig
    from segrew.run_directory import read_jsonl

    seconds: dict[str, float] = {}
    before = memory_of_imports()
    timed(seconds, "step", ppo, "train_step")
    config = PPOConfig(
        model_name_or_path=job["model"], reward_model_path=job["reward_model"], dataset_name=job["dataset"],
        output_dir=f"{job['output']}/run", use_peft=job["tune"] == "lora", lora_r=LORA, lora_alpha=2 * LORA,
        rollout_batch_size=len(job["prompts"]), local_rollout_forward_batch_size=job["rollout_batch"], total_steps=1,
        per_device_train_batch_size=job["batch"], max_new_tokens=job["tokens"], bf16=job["dtype"] == "bfloat16",
        critic_learning_rate=1e-6, kl_coef=0.05, save_steps=0, seed=SEED,
    )  # fmt: skip
    with clock(seconds, "whole"):
        ppo.train_policy(config)
    (metrics,) = read_jsonl(Path(config.output_dir) / "metrics.jsonl")
    seconds |= {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    tokens = round(metrics["response/length"] * len(job["prompts"]))
    found = {"kl": metrics["kl/k1"], "score": metrics["reward/score"], "answer_tokens": tokens}
    return result_of(seconds, found) | spent(seconds, before, "transformers", "torch", "peft")


def result_of(seconds: dict[str, float], found: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": seconds["step"], "cpu_seconds": seconds["step_cpu"]} | found


def prepare(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Pick prompts, write them for segrew, make a reward model with a random head; return the shared job."""
    import torch

    from reward_models.card import RewardModelCard
    from reward_models.checkpoints import load_classifier
    from reward_models.segment_reward_model import SegmentRewardModel
    from segrew.chat import ChatFormat
    from segrew.language_models import load_tokenizer
    from segrew.preferences import load_preferences
    from segrew.segmentation import SegmentationConfig

    chat = ChatFormat.from_tokenizer(load_tokenizer(model))
    prompts: dict[str, tuple[Any, list[int]]] = {}
    for pair in load_preferences(arguments.dataset, "train").pairs:
        ids = chat.prompt_ids(pair.prompt)
        if len(ids) <= arguments.max_prompt_length:
            prompts.setdefault(repr(ids), (pair.prompt, ids))
        if len(prompts) == arguments.prompts:
            break
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt, _ in prompts.values())
    (folder / "prompts.jsonl").write_text(rows)
    torch.manual_seed(SEED)
    card = RewardModelCard(
        segmentation=SegmentationConfig(rule="response"), base_model=model, segmenter_fingerprint="",
        tokenizer_fingerprint=chat.fingerprint,
    )  # fmt: skip
    classifier = load_classifier(model, new_head=True, dtype=torch.float32)
    SegmentRewardModel(classifier, chat, card).save_pretrained(folder / "reward_model")
    return {
        "model": model, "reward_model": str(folder / "reward_model"), "dataset": str(folder / "prompts.jsonl"),
        "prompts": [ids for _, ids in prompts.values()], "tokens": arguments.tokens, "batch": arguments.batch,
        "rollout_batch": 32, "dtype": arguments.dtype, "tune": arguments.tune,
    }  # fmt: skip


def line_of(arguments: argparse.Namespace, job: dict[str, Any], results: Results) -> dict[str, Any]:
    peer, ours = results["trl"], results["segrew"]
    target, speedup = TARGETS[arguments.tune], ratio(peer, ours, "seconds")
    memory = round(1 / ratio(peer, ours, "peak_mib"), 2)
    return {
        "name": f"{arguments.tune}, {arguments.dtype}, {arguments.prompts} prompts x {arguments.tokens} tokens",
        "settings": {key: job[key] for key in ("tokens", "batch", "rollout_batch", "dtype", "tune")}
        | {"prompts": len(job["prompts"]), "prompt_tokens": sum(map(len, job["prompts"]))},
        "repeats": len(ours),
        "seconds": [round(median(side, "seconds"), 2) for side in (peer, ours)],
        "speedup": speedup,
        "cpu_time_ratio": ratio(peer, ours, "cpu_seconds"),
        "peak_mib_over_imports": [round(median(side, "peak_mib")) for side in (peer, ours)],
        "peak_mib_of_the_process": [round(median(side, "whole_mib")) for side in (peer, ours)],
        "memory_of_trl": memory,
        "phases": {
            name: {part: round(median([turn["parts"] for turn in side], part), 2) for part in side[0]["parts"]}
            for name, side in results.items()
        },
        "answer_tokens": [round(median(side, "answer_tokens")) for side in (peer, ours)],
        "kl_and_score": {name: [[turn["kl"], turn["score"]] for turn in side] for name, side in results.items()},
        "cpu_seconds_of_each_turn": {
            name: [round(turn["cpu_seconds"], 2) for turn in side] for name, side in results.items()
        },
        "seconds_of_each_turn": {name: [round(turn["seconds"], 2) for turn in side] for name, side in results.items()},
        "versions": peer[0]["versions"],
        "target": f"≥ 2x, memory ≤ {target}",
        "met": [met(2.0, speedup, ratio(peer, ours, "cpu_seconds")), memory <= target],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", help="Python of an environment with TRL 1.12 or older")
    parser.add_argument("--dataset", help="preference pairs whose prompts are answered: a file")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer, at most")
    parser.add_argument("--max_prompt_length", type=int, default=256, help="longer prompts are passed over")
    parser.add_argument("--batch", type=int, default=8, help="rows of a forward and backward pass")
    parser.add_argument("--tune", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    arguments = parse(parser, "benchmarks/ppo_vs_trl.json", measure_trl, measure_segrew, "trl")
    if arguments is None:
        return
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as name:
        job = prepare(arguments, model_for(arguments.quick, Path(name)), Path(name))
        sides = {"trl": (arguments.peer_python, job), "segrew": (sys.executable, job)}
        line = take_turns(__file__, sides, arguments, lambda results: line_of(arguments, job, results))
    table = Table("", "TRL", "segrew", "ratio", "target")
    verdicts = ["met" if good else "MISSED" for good in line["met"]]
    table.add_row("seconds", *map(str, line["seconds"]), f"{line['speedup']}x", f"≥ 2x: {verdicts[0]}")
    table.add_row("CPU time", "", "", f"{line['cpu_time_ratio']}x", "")
    table.add_row(
        "peak MiB",
        *map(str, line["peak_mib_over_imports"]),
        str(line["memory_of_trl"]),
        f"≤ {TARGETS[arguments.tune]}: {verdicts[1]}",
    )
    table.add_row("tokens answered", *map(str, line["answer_tokens"]), "", "")
    parts = (
        "rollout",
        "logprobs",
        "reference",
        "segment",
        "score and value",
        "values",
        "score",
        "advantages",
        "update",
    )
    for part in parts:
        spent = [line["phases"][name].get(part) for name in ("trl", "segrew")]
        if any(spent):
            table.add_row(f"  {part}, s", *("" if value is None else str(value) for value in spent), "", "")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
