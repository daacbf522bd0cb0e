"""One LoRA run of the entropy rule on SmolLM2-135M with real pairs, then benchmarked.

    python experiments/lora_entropy/run.py --files hh_helpful_test.jsonl.gz hh_harmless_base_test.jsonl.gz \
        --benchmark rewardbench_v1_rebuilt.jsonl.gz

Trains on 256 of 512 pairs (32 updates of 8, half of each file) and evaluates on 512 others with other prompts. A stage
whose output is there is not run again. Copies what came of it beside this file.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from segrew.cli import main as segrew
from segrew.preferences import PreferencePair, load_preferences
from segrew.run_directory import write_json, write_jsonl

HERE = Path(__file__).parent


def as_rows(pairs: list[PreferencePair]) -> list[dict]:
    return [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs=2, required=True)
    parser.add_argument("--benchmark", required=True)
    parser.add_argument("--max_per_subset", default="25")
    parser.add_argument("--work", type=Path, default=Path("runs/lora_entropy"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    # Pairs 256-wide blocks of the two files laid end to end: 0 and 9 to train on, 2 and 11 to evaluate on.
    pairs = [pair for file in args.files for pair in load_preferences(file).pairs]
    blocks = {"train": (0, 9), "test": (2, 11)}
    parts = {name: [p for k in ks for p in pairs[256 * k : 256 * (k + 1)]] for name, ks in blocks.items()}
    assert not {repr(p.prompt) for p in parts["train"]} & {repr(p.prompt) for p in parts["test"]}
    for name, part in parts.items():
        write_jsonl(args.work / f"{name}.jsonl", as_rows(part))
    reward_model, bench = args.work / "reward_model", args.work / "benchmark"
    stages = [
        (reward_model / "segrew.json", "train-rm", {
            "dataset_name": args.work / "train.jsonl", "eval_dataset_name": args.work / "test.jsonl", "rule": "entropy",
            "target_length": 4, "aggregator": "mean", "tune": "lora", "learning_rate": 2e-4, "max_length": 512,
            "per_device_train_batch_size": 8, "max_steps": 32, "seed": 0, "output_dir": reward_model,
            "overwrite_output_dir": "true",
        }),
        (bench / "results.json", "rewardbench", {
            "reward_model": reward_model, "dataset_name": args.benchmark, "subset_label": "rebuilt",
            "max_per_subset": args.max_per_subset, "output_dir": bench, "overwrite_output_dir": "true",
        }),
    ]  # fmt: skip
    seconds = json.loads((HERE / "seconds.json").read_text()) if (HERE / "seconds.json").exists() else {}
    for done, command, settings in stages:
        if done.exists():
            continue
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        print("segrew", command, *flags, flush=True)
        begun = time.time()
        if segrew([command, *flags]) != 0:
            raise SystemExit(f"{command} failed")
        seconds[command] = round(time.time() - begun)
        write_json(HERE / "seconds.json", seconds)
    for source in (reward_model / "evaluation.json", bench / "results.json"):
        shutil.copy(source, HERE / source.name)


if __name__ == "__main__":
    main()
