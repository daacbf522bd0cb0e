"""`segrew rewardbench` beside the `rewardbench` program of AI2: seconds a pair on the same model and rows, and scores.

    python3 -m venv /tmp/rb && /tmp/rb/bin/pip install rewardbench 'setuptools<80'     # it pins transformers 4.51
    python benchmarks/rewardbench_vs_package.py --peer_python /tmp/rb/bin/python --dataset reward_bench.jsonl

The model is SmolLM2-135M with a head fitted on 32 embedded pairs (or --reward_model), read once at the stop token,
under a template that writes nothing after it: the program reads the last token of the text. It encodes prompt and
answer as one text, so white space at the head of an answer joins the template's line feed; segrew keeps the answer's
tokens, as a policy writes them. Scores are compared on the rows where both are the same tokens, which are counted. On a
machine without CUDA the program's `.to("cuda")` is turned to the CPU, and its quantization is off. A figure counts
encoding and scoring and leaves out loading, which is listed. Prints a table and writes a line of --output.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import Results, clock, median, memory_of_imports, met, model_for, parse, ratio, spent, take_turns, timed

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def measure_package(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from rewardbench import models
    from rewardbench.constants import EXAMPLE_COUNTS, SUBSET_MAPPING
    from rewardbench.models.pipeline import RewardBenchPipeline
    from rewardbench.rewardbench import Args, rewardbench
    from rewardbench.utils import calculate_scores_per_section
    from transformers import BatchEncoding

    seconds: dict[str, float] = {}
    before = memory_of_imports()
    if not torch.cuda.is_available():
        move = getattr(BatchEncoding.to, "original", BatchEncoding.to)
        BatchEncoding.to = lambda self, device, **options: move(self, "cpu" if device == "cuda" else device, **options)
        BatchEncoding.to.original = move
    entry = models.REWARD_MODEL_CONFIG["default"]
    build = getattr(entry["model_builder"], "original", entry["model_builder"])

    def load(*args: Any, **options: Any) -> Any:
        with clock(seconds, "load"):
            return build(*args, **options)

    load.original = build  # type: ignore[attr-defined]
    entry["model_builder"] = load
    timed(seconds, "score", RewardBenchPipeline, "__call__")
    with contextlib.chdir(job["output"]):  # it makes the names of its files from the model's
        Path("model").symlink_to(job["reward_model"])
        arguments = Args(
            dataset=job["conversations"], load_json=True, model="model", not_quantized=True, torch_dtype=job["theirs"],
            output_dir="results/", batch_size=job["batch"],
        )  # fmt: skip
        with clock(seconds, "whole"):
            rewardbench(arguments)
        rows = [json.loads(line) for line in Path("results/model_outputs.jsonl").read_text().splitlines()]
    scores = [[row["scores_chosen"], row["scores_rejected"]] for row in rows]
    won: dict[str, list[int]] = {}
    for subset, row in zip(job["subsets"], rows, strict=True):
        won.setdefault(subset, []).append(row["results"])
    accuracies = {subset: sum(results) / len(results) for subset, results in won.items()}
    sections = calculate_scores_per_section(EXAMPLE_COUNTS, SUBSET_MAPPING, accuracies)
    return result_of(sections, seconds, scores) | spent(seconds, before, "rewardbench", "transformers", "torch")


def measure_segrew(job: dict[str, Any]) -> dict[str, Any]:
    from reward_models import benchmarks, rewardbench
    from reward_models.segment_reward_model import SegmentRewardModel
    from segrew.run_directory import read_jsonl

    os.environ["SEGREW_CACHE"] = f"{job['output']}/cache"
    seconds: dict[str, float] = {}
    before = memory_of_imports()
    timed(seconds, "load", SegmentRewardModel, "from_pretrained")
    timed(seconds, "score", benchmarks, "score_items")
    config = rewardbench.BenchmarkConfig(
        reward_model=job["reward_model"], dataset_name=job["dataset"], output_dir=f"{job['output']}/run",
        dtype=job["ours"],
    )  # fmt: skip
    with clock(seconds, "whole"):
        found = rewardbench.run_benchmark(config)
    rows = read_jsonl(Path(config.output_dir) / rewardbench.SCORES_FILE)
    scores = [[row["score_chosen"], row["score_rejected"]] for row in rows]
    sections = {name: entry["accuracy"] for name, entry in found["sections"].items()}
    return result_of(sections, seconds, scores) | spent(seconds, before, "transformers", "torch")


def result_of(sections: dict[str, float], seconds: dict[str, float], scores: list[list[float]]) -> dict[str, Any]:
    return {
        "seconds_per_pair": seconds["score"] / len(scores),
        "cpu_seconds": seconds["score_cpu"],
        "accuracy": sum(a > b for a, b in scores) / len(scores),
        "sections": sections,
        "scores": scores,
    }


def fit_head(folder: Path, quick: bool) -> str:
    """Fit a bandit head on the embedded pairs; return its directory."""
    from reward_models.train import train_reward_model
    from reward_models.train_config import RewardModelConfig, RewardTrainingArguments

    (folder / "template.jinja").write_text(TEMPLATE)
    config = RewardModelConfig(
        model_name_or_path=model_for(quick, folder), tune="head", rule="response", max_length=512, max_pairs=32,
        dataset_test_split=None, chat_template=str(folder / "template.jinja"),
    )  # fmt: skip
    train_reward_model(config, RewardTrainingArguments(output_dir=str(folder / "reward_model")))
    card = folder / "reward_model" / "segrew.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"max_length": 1 << 16}))  # nothing is cut
    return str(folder / "reward_model")


def same_tokens(chat: Any, turns: list[dict[str, str]]) -> bool:
    """Whether the whole text, which the program encodes, has the tokens of prompt and answer one after the other."""
    whole = chat.tokenizer(chat.tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
    return whole == chat.prompt_ids(turns[:-1]) + chat.response_ids(turns[-1]["content"])


def prepare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the rows for both sides: every k-th of the file, long ones left out."""
    from segrew.chat import ChatFormat
    from segrew.language_models import load_tokenizer
    from segrew.records import read_records

    rows = [row for _, row in read_records(arguments.dataset) if len(str(row)) <= arguments.max_characters]
    rows = rows[:: max(1, len(rows) // arguments.rows)][: arguments.rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = [
        {
            side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for side in ("chosen", "rejected")
        }
        for row in rows
    ]
    reward_model = str(Path(arguments.reward_model or fit_head(folder, arguments.quick)).resolve())
    chat = ChatFormat.from_tokenizer(load_tokenizer(reward_model))
    (folder / "conversations.json").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return {
        "dataset": str(folder / "rows.jsonl"), "conversations": str(folder / "conversations.json"), "batch": 8,
        "reward_model": reward_model,
        "same_tokens": [all(same_tokens(chat, turns) for turns in row.values()) for row in conversations],
        "theirs": "float16" if arguments.dtype == "default" else arguments.dtype,
        "ours": "auto" if arguments.dtype == "default" else arguments.dtype,
        "rows": len(rows), "subsets": [row["subset"] for row in rows],
    }  # fmt: skip


def line_of(arguments: argparse.Namespace, job: dict[str, Any], results: Results) -> dict[str, Any]:
    peer, ours = results["rewardbench"], results["segrew"]
    target, speedup = 5.0 if arguments.dtype == "default" else 2.5, ratio(peer, ours, "seconds_per_pair")
    pairs = list(zip(peer[0]["scores"], ours[0]["scores"], strict=True))
    equal = [pair for pair, same in zip(pairs, job["same_tokens"], strict=True) if same]
    line = {
        "name": f"{arguments.dtype}, {job['rows']} rows",
        "model": "tiny" if arguments.quick else arguments.reward_model or "SmolLM2-135M, head fitted on 32 pairs",
        "dataset": Path(arguments.dataset).name,
        "settings": {"rows": job["rows"], "max_characters": arguments.max_characters, "batch": job["batch"]},
        "dtypes": [job["theirs"], job["ours"]],
        "repeats": len(ours),
        "seconds_per_pair": [round(median(side, "seconds_per_pair"), 3) for side in (peer, ours)],
        "speedup": speedup,
        "cpu_time_ratio": ratio(peer, ours, "cpu_seconds"),
        "peak_mib": [round(median(side, "peak_mib")) for side in (peer, ours)],
        "parts": [side[0]["parts"] for side in (peer, ours)],
        "accuracies": [side[0]["accuracy"] for side in (peer, ours)],
        "sections": [side[0]["sections"] for side in (peer, ours)],
        "rows_judged_alike": sum((a > b) == (c > d) for (a, b), (c, d) in pairs),
        "rows_of_equal_tokens": len(equal),
        "of_these_judged_alike": sum((a > b) == (c > d) for (a, b), (c, d) in equal),
        "largest_difference_of_their_scores": max(abs(x - y) for a, b in equal for x, y in zip(a, b, strict=True)),
        "seconds_of_each_turn": {
            name: [round(turn["parts"]["score"], 2) for turn in side] for name, side in results.items()
        },
        "versions": peer[0]["versions"],
        "target": f"≥ {target}x" + (", rows of equal tokens alike" if arguments.dtype == "float32" else ""),
    }
    alike = arguments.dtype != "float32" or line["of_these_judged_alike"] == len(equal)
    line["met"] = alike and met(target, speedup, line["cpu_time_ratio"])
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", help="Python of an environment with rewardbench")
    parser.add_argument("--dataset", help="rows of RewardBench: a file")
    parser.add_argument("--reward_model", help="directory of a bandit reward model; default a head fitted here")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--max_characters", type=int, default=1 << 20, help="longer rows are passed over")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "default"], default="float32", help="default: float16 and as stored"
    )
    arguments = parse(parser, "benchmarks/rewardbench_vs_package.json", measure_package, measure_segrew, "rewardbench")
    if arguments is None:
        return
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as name:
        job = prepare(arguments, Path(name))
        sides = {"rewardbench": (arguments.peer_python, job), "segrew": (sys.executable, job)}
        line = take_turns(__file__, sides, arguments, lambda results: line_of(arguments, job, results))
    table = Table("", "rewardbench", "segrew", "ratio", "target")
    verdict = "met" if line["met"] else "MISSED"
    table.add_row(
        "seconds a pair", *map(str, line["seconds_per_pair"]), f"{line['speedup']}x", f"{line['target']}: {verdict}"
    )
    table.add_row("CPU time", "", "", f"{line['cpu_time_ratio']}x", "")
    table.add_row("accuracy", *(f"{value:.4f}" for value in line["accuracies"]), "", "")
    for kind, count in (("rows_judged_alike", job["rows"]), ("of_these_judged_alike", line["rows_of_equal_tokens"])):
        table.add_row(kind.replace("_", " "), "", "", f"{line[kind]} of {count}", "")
    table.add_row("largest difference", "", "", f"{line['largest_difference_of_their_scores']:.1e}", "of their scores")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
