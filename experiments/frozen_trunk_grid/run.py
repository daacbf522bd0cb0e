"""Which rule, which aggregator? A frozen SmolLM2-135M trunk on real preference pairs, 5 splits by prompt.

    python experiments/frozen_trunk_grid/run.py --name hh --files HELPFUL.jsonl.gz HARMLESS.jsonl.gz

Each split holds out 15 % of the prompts. The states of every response token are computed once and kept in segrew's
cache in chunks, and a fit that is in NAME.json is not made again, so an interrupted run goes on where it stopped.
Writes NAME.json and NAME.md beside this file.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from reward_models.frozen_trunk import fit_head, scores_of
from reward_models.pairs import SegmentedPairs, segment_pairs, unit_states
from segrew.chat import ChatFormat
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import PreferencePair, load_preferences
from segrew.run_directory import read_json, write_json
from segrew.segmentation import SegmentationConfig, segment

HERE = Path(__file__).parent
RULES = {
    "response": SegmentationConfig(rule="response"),
    "token": SegmentationConfig(rule="token"),
    "sentence": SegmentationConfig(rule="sentence"),
    "entropy": SegmentationConfig(rule="entropy", target_length=4.0),
}
MATTER = ("files", "model", "max_length", "max_pairs", "penalty")  # settings that two runs of one name share
AGGREGATORS = ("mean", "sum", "softmax", "softmin", "log_mean_exp", "max", "min", "last")


def read_all(pairs: list[PreferencePair], model_name: str, max_length: int) -> SegmentedPairs:
    """Compute (or load) entropies and states of every response token."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(model_name))
    model = load_causal_lm(model_name)
    return segment_pairs(
        pairs, chat, RULES["token"], model, max_length=max_length, with_states=True, description="Reading"
    )


def split_by_prompt(pairs: list[PreferencePair], seed: int) -> tuple[list[int], list[int]]:
    """Hold out 15 % of the distinct prompts."""
    prompts = sorted({json.dumps(pair.prompt) for pair in pairs})
    random.Random(seed).shuffle(prompts)
    held = set(prompts[: round(0.15 * len(prompts))])
    test = [i for i, pair in enumerate(pairs) if json.dumps(pair.prompt) in held]
    return sorted(set(range(len(pairs))) - set(test)), test


def rows_of(chosen: list[int]) -> torch.Tensor:
    """Rows of the given pairs: two each."""
    return torch.tensor([row for i in chosen for row in (2 * i, 2 * i + 1)])


def flat_units(unit_mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Which of all units belong to the given rows, in the order of the rows."""
    first = torch.cat([torch.zeros(1, dtype=torch.long), unit_mask.sum(1).cumsum(0)])
    return torch.cat([torch.arange(first[r], first[r + 1]) for r in rows.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of what is written")
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--max_pairs", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--penalty", type=float, default=0.1)
    args = parser.parse_args()
    started, record = time.time(), HERE / f"{args.name}.json"
    settings = vars(args) | {"files": [Path(file).name for file in args.files]}
    before = read_json(record) if record.exists() else {"settings": settings, "results": []}
    other = [name for name in MATTER if before["settings"][name] != settings[name]]
    if other:
        parser.error(f"{record} was made with another --{', --'.join(other)}; take another --name.")
    results: list[dict] = before["results"]
    done = {(fit["rule"], fit["seed"], fit["aggregator"]) for fit in results}
    pairs = [pair for file in args.files for pair in load_preferences(file).pairs][: args.max_pairs]
    data = read_all(pairs, args.model, args.max_length)
    seconds = {"reading": time.time() - started}
    texts = ChatFormat.from_tokenizer(load_tokenizer(args.model)).response_texts(data.conversations.responses)
    for rule, seed in product(args.rules, range(args.seeds)):
        kinds = AGGREGATORS[:1] if rule == "response" else AGGREGATORS
        missing = [kind for kind in kinds if (rule, seed, kind) not in done]
        if missing:
            results += fits(data, texts, rule, seed, missing, args.penalty)
            seconds["total"] = time.time() - started
            about = {"pairs": len(data), "settings": settings, "seconds_of_last_run": seconds}
            write_json(record, about | {"results": results})
    text = table(results, len(data))
    (HERE / f"{args.name}.md").write_text(text + "\n")
    print(text)


def fits(
    data: SegmentedPairs, texts: list[str], rule: str, seed: int, aggregators: list[str], penalty: float
) -> list[dict]:
    """Fit a head with each aggregator on one split, cut by one rule, and judge it on the pairs held out."""
    train, test = split_by_prompt(data.pairs, seed)
    fitted = RULES[rule].resolve(data.features.entropy[rows_of(train)], data.conversations.mask[rows_of(train)])
    cut = segment(
        fitted, data.conversations.mask, entropy=data.features.entropy, texts=texts, ended=data.conversations.ended
    )
    states, unit_mask = unit_states(replace(data, segmentation=cut, rule=fitted))
    parts = {}
    for side, rows in (("train", rows_of(train)), ("test", rows_of(test))):
        parts[side] = (states[flat_units(unit_mask, rows)], unit_mask[rows])
    found = []
    for aggregator in aggregators:
        begun = time.time()
        weight = fit_head(*parts["train"], aggregator=aggregator, penalty=penalty)
        scores = scores_of(weight, parts["test"][0].float(), parts["test"][1], aggregator=aggregator)
        wins = int((scores[0::2] > scores[1::2]).sum())
        longer = sum(len(data.pairs[i].chosen) > len(data.pairs[i].rejected) for i in test)
        found.append(
            {
                "rule": rule, "label": fitted.label, "aggregator": aggregator, "seed": seed,
                "accuracy": wins / len(test), "n": len(test), "longer_wins": longer / len(test),
                "units": float(unit_mask.sum(1).float().mean()), "fit_seconds": time.time() - begun,
            }
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def table(results: list[dict], n_pairs: int) -> str:
    """Mean accuracy over splits, its spread, and the gain over the response reading."""
    rules = [rule for rule in RULES if any(fit["rule"] == rule for fit in results)]
    lines = ["| aggregator | " + " | ".join(rules) + " |", "|---|" + "---|" * len(rules)]
    found = {(rule, kind): [r for r in results if (r["rule"], r["aggregator"]) == (rule, kind)] for rule in rules
             for kind in AGGREGATORS}  # fmt: skip
    units = [f"{statistics.mean(r['units'] for r in found[rule, 'mean']):.1f}" for rule in rules]
    lines.append("| units a response | " + " | ".join(units) + " |")
    for kind in AGGREGATORS:
        cells = []
        for rule in rules:
            values = [r["accuracy"] for r in found[rule, kind]]
            gains = [r["accuracy"] - b["accuracy"] for r, b in zip(found[rule, kind], found["response", "mean"])]  # noqa: B905
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread} ({statistics.mean(gains):+.3f})" if values else "")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    longer = statistics.mean(r["longer_wins"] for r in results)
    lines += ["", f'"the longer answer wins": {longer:.3f}; {n_pairs} pairs, about {results[0]["n"]} held out a split']
    return "\n".join(lines)


if __name__ == "__main__":
    main()
