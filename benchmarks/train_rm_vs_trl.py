"""`segrew train-rm` beside TRL's RewardTrainer: pairs per second, losses, memory and what became of long pairs.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl peft jaxtyping     # in an environment of its own
    python benchmarks/train_rm_vs_trl.py --peer_python /tmp/trl/bin/python --dataset hh.jsonl --tune lora

TRL gets the token ids that segrew makes, the same new head, optimizer, order of pairs and precision, and no activation
checkpointing (its default has it, and is slower). The rule `response` reads what TRL reads, once, at the stop token;
`entropy` also cuts every response by a frozen model first. A figure counts encoding, segmentation and training, and
leaves out loading and saving models, which are listed. Prints a table and writes a line of --output.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import Results, clock, median, memory_of_imports, met, model_for, parse, ratio, spent, take_turns, timed

SEED, LORA = 0, 16
RATES = {"lora": 1e-4, "full": 1e-5}


def training_arguments(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": job["batch"], "num_train_epochs": 1, "learning_rate": RATES[job["tune"]],
        "lr_scheduler_type": "linear", "warmup_steps": 0, "bf16": job["dtype"] == "bfloat16", "seed": SEED,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [float(entry["loss"]) for entry in log if "loss" in entry]


def measure_trl(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, TaskType
    from transformers import AutoTokenizer, set_seed
    from trl import RewardConfig, RewardTrainer

    from reward_models.checkpoints import load_classifier  # the same new head; the package's own is another draw

    seconds: dict[str, float] = {}
    before = memory_of_imports()
    with clock(seconds, "load"):
        set_seed(SEED)
        model = load_classifier(job["model"], new_head=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = job["pad_token"]
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=LORA, lora_alpha=2 * LORA, target_modules="all-linear",
        exclude_modules=["score"], modules_to_save=["score"],
    )  # fmt: skip
    rows = [json.loads(line) for line in Path(job["ids"]).read_text().splitlines()]
    arguments = RewardConfig(output_dir=job["output"], max_length=job["max_length"], **training_arguments(job))
    with clock(seconds, "data"):
        trainer = RewardTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            peft_config=lora if job["tune"] == "lora" else None,
        )  # fmt: skip
    with clock(seconds, "train"):
        trainer.train()
    kept = len(trainer.train_dataset)
    curve = losses(trainer.state.log_history)
    return result_of(seconds, kept, curve) | spent(seconds, before, "trl", "transformers", "torch")


def measure_segrew(job: dict[str, Any]) -> dict[str, Any]:
    # An empty cache: what segmentation costs is to be in the figure.
    os.environ["SEGREW_CACHE"] = f"{job['output']}/cache"
    from reward_models import train, train_inputs
    from reward_models.train_config import RewardModelConfig, RewardTrainingArguments
    from segrew.run_directory import read_json, read_jsonl

    seconds: dict[str, float] = {}
    before = memory_of_imports()
    timed(seconds, "data", train_inputs, "segment_pairs")
    timed(seconds, "train", train, "_train_with_trainer")
    directory = Path(job["output"]) / "run"
    rule: dict[str, Any] = {"target_length": 4.0} if job["rule"] == "entropy" else {}
    config = RewardModelConfig(
        model_name_or_path=job["model"], dataset_name=job["dataset"], dataset_test_split=None, rule=job["rule"],
        tune=job["tune"], lora_r=LORA, lora_alpha=2 * LORA, max_length=job["max_length"], overlong="drop",
        max_pairs=job["pairs"], **rule,
    )  # fmt: skip
    arguments = RewardTrainingArguments(output_dir=str(directory), **training_arguments(job))
    with clock(seconds, "whole"):
        train.train_reward_model(config, arguments)
    kept = read_json(directory / "evaluation.json")["train_pairs"]
    curve = losses(read_jsonl(directory / "metrics.jsonl"))
    said = {"said": read_json(directory / "data.json")}
    return result_of(seconds, kept, curve) | said | spent(seconds, before, "transformers", "torch", "peft")


def result_of(seconds: dict[str, float], kept: int, curve: list[float]) -> dict[str, Any]:
    counted = seconds["data"] + seconds["train"]
    return {
        "pairs_per_second": kept / counted,
        "seconds": counted,
        "cpu_seconds": seconds["data_cpu"] + seconds["train_cpu"],
        "kept": kept,
        "losses": curve,
    }


def prepare(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Write the pairs as token ids for TRL; return the job that all sides share."""
    from segrew.chat import ChatFormat
    from segrew.encoding import encode_pairs
    from segrew.language_models import load_tokenizer, unused_pad_id
    from segrew.preferences import load_preferences

    chat = ChatFormat.from_tokenizer(load_tokenizer(model))
    pairs = load_preferences(arguments.dataset, "train", limit=arguments.pairs).pairs
    _, encoded, _ = encode_pairs(pairs, chat, 1 << 20, keep_identical=True)
    rows = [
        {"chosen_ids": prompts[0] + pair.chosen, "rejected_ids": prompts[1] + pair.rejected}
        for pair in encoded
        for prompts in [pair.prompts]
    ]
    (folder / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": model, "ids": str(folder / "ids.jsonl"), "dataset": arguments.dataset, "pairs": arguments.pairs,
        "max_length": arguments.max_length, "batch": arguments.batch, "dtype": arguments.dtype, "tune": arguments.tune,
        "pad_token": chat.tokenizer.convert_ids_to_tokens(unused_pad_id(chat.tokenizer, chat.stop_ids)),
        "read": len(rows),
    }  # fmt: skip


def compare(results: Results) -> list[dict[str, Any]]:
    peer = results["trl"]
    sides = []
    for rule, target in (("response", 2.0), ("entropy", 1.6)):
        ours = results[rule]
        gain = ratio(ours, peer, "pairs_per_second")
        gaps = [abs(a - b) for a, b in zip(peer[0]["losses"], ours[0]["losses"], strict=True)]
        last = [side[0]["losses"][-1] for side in (peer, ours)]
        sides.append(
            {
                "rule": rule,
                "trl_pairs_per_second": round(median(peer, "pairs_per_second"), 3),
                "segrew_pairs_per_second": round(median(ours, "pairs_per_second"), 3),
                "speedup": gain,
                "cpu_time_ratio": ratio(peer, ours, "cpu_seconds"),
                "memory_of_trl": round(1 / ratio(peer, ours, "peak_mib"), 2),
                "peak_mib": [round(median(side, "peak_mib")) for side in (peer, ours)],
                "parts": [side[0]["parts"] for side in (peer, ours)],
                "last_losses": last,
                "largest_difference_of_a_loss": max(gaps) if rule == "response" else None,
                "target": f"≥ {target}x",
                "met": met(target, gain, ratio(peer, ours, "cpu_seconds")),
            }
        )
    return sides


def line_of(arguments: argparse.Namespace, job: dict[str, Any], results: Results) -> dict[str, Any]:
    return {
        "name": f"{arguments.tune}, {arguments.dtype}, {arguments.pairs} pairs, max_length {arguments.max_length}",
        "dataset": Path(arguments.dataset).name,
        "settings": {key: job[key] for key in ("pairs", "max_length", "batch", "dtype", "tune")},
        "repeats": len(results["entropy"]),
        "pairs_read": job["read"],
        "pairs_kept": {name: side[0]["kept"] for name, side in results.items()},
        "segrew_says": results["response"][0]["said"],
        "versions": results["trl"][0]["versions"],
        "sides": compare(results),
        "pairs_per_second_of_each_turn": {
            name: [round(one["pairs_per_second"], 3) for one in side] for name, side in results.items()
        },
        "cpu_seconds_of_each_turn": {
            name: [round(one["cpu_seconds"], 2) for one in side] for name, side in results.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", help="Python of an environment with TRL")
    parser.add_argument("--dataset", help="preference pairs: a file")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--max_length", type=int, default=1024, help="pairs with a longer side are left out by both")
    parser.add_argument("--tune", choices=["lora", "full"], default="lora")
    parser.add_argument("--batch", type=int, default=8, help="pairs of a step")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of autocast")
    arguments = parse(parser, "benchmarks/train_rm_vs_trl.json", measure_trl, measure_segrew, "trl")
    if arguments is None:
        return
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as name:
        job = prepare(arguments, model_for(arguments.quick, Path(name)), Path(name))
        sides = {"trl": (arguments.peer_python, job)}
        sides |= {rule: (sys.executable, job | {"rule": rule}) for rule in ("response", "entropy")}
        found = take_turns(__file__, sides, arguments, lambda results: line_of(arguments, job, results))
    table = Table(
        "rule", "TRL pairs/s", "segrew pairs/s", "ratio", "of CPU time", "memory of TRL's", "last loss", "target"
    )
    for line in found["sides"]:
        speeds = (f"{line['trl_pairs_per_second']}", f"{line['segrew_pairs_per_second']}")
        gains = (f"{line['speedup']}x", f"{line['cpu_time_ratio']}x", f"{line['memory_of_trl']}")
        last, verdict = " / ".join(f"{x:.4f}" for x in line["last_losses"]), "met" if line["met"] else "MISSED"
        table.add_row(line["rule"], *speeds, *gains, last, f"{line['target']}: {verdict}")
    Console(width=130).print(table)
    print(f"{job['read']} pairs read; kept by each side: {found['pairs_kept']}; written to {arguments.output}")


if __name__ == "__main__":
    main()
