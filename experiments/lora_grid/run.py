"""Response, token, sentence or entropy units? LoRA on real pairs, three seeds, measured in three places.

    python experiments/lora_grid/run.py --files PAIRS... --shares NUMBERS... --benchmark ROWS --spans MARKED

Each arm sees 1,200 pairs once and is measured on held-out pairs (also after 300 and 600: the learning curve), on
600 rows of RewardBench in their proportions, and on answers whose errors people have marked. LoRA sits on the last
layers only, so that the states below them are computed once for all arms. With `--stage frozen`, heads fitted on the
frozen trunk are measured on the same rows. Finished runs are kept in runs.jsonl and frozen.jsonl and not run again;
`table.py` makes the tables.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from states import Stored, Texts, batches, fingerprint, merged, read_texts, rows_of, stored, upper_model, use_states

from reward_models.card import RewardModelCard
from reward_models.frozen_trunk import fit_head
from reward_models.localisation_metrics import low_reward_auc
from reward_models.localise import in_spans
from reward_models.losses import preference_loss
from reward_models.reading import read_units
from reward_models.token_credit import prefix_values
from segrew.aggregation import aggregate
from segrew.chat import ChatFormat
from segrew.conversations import micro_batches
from segrew.embedded_model import EMBEDDED_MODEL
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.segmentation import Segmentation, SegmentationConfig, read_columns, segment

HERE = Path(__file__).parent
RULES = {
    "response": SegmentationConfig(rule="response"),
    "token": SegmentationConfig(rule="token"),
    "sentence": SegmentationConfig(rule="sentence"),
    "entropy": SegmentationConfig(rule="entropy", target_length=4.0),
}
ARMS = {
    "response": ("response", "mean"),
    "token, mean": ("token", "mean"),
    "sentence, mean": ("sentence", "mean"),
    "entropy, mean": ("entropy", "mean"),
    "entropy, softmax": ("entropy", "softmax"),
}
AGGREGATORS = ("mean", "sum", "softmax", "softmin", "log_mean_exp", "max", "min", "last")
SIZES = (150, 300, 600, 1200)
CURVE = (300, 600)
BATCH = 15


class Part:
    """One part of the experiment with its units by every rule."""

    def __init__(self, texts: Texts, held: Stored, rules: dict[str, SegmentationConfig], chat: ChatFormat):
        self.texts, self.held = texts, held
        mask, ended = texts.rows.mask, texts.rows.ended
        self.cuts: dict[str, Segmentation] = {
            name: segment(
                rule, mask, entropy=held.entropy, texts=chat.response_texts(texts.rows.responses), ended=ended
            )
            for name, rule in rules.items()
        }  # fmt: skip
        self.chat = chat

    def scores(self, values: Tensor, rule: str, aggregator: Any) -> Tensor:
        """Score rows from the reading after each token."""
        cut = self.cuts[rule]
        return aggregate(self.rewards(values, rule), cut.unit_mask, kind=aggregator)

    def rewards(self, values: Tensor, rule: str) -> Tensor:
        """Reward of each unit from the reading after each token."""
        cut = self.cuts[rule]
        return values.gather(1, read_columns(cut, self.texts.rows.ended, "end")).masked_fill(~cut.unit_mask, 0)

    def wins(self, values: Tensor, rule: str, aggregator: Any) -> str:
        """One digit a pair: 1 where the better answer scores higher."""
        scores = self.scores(values, rule, aggregator)
        return "".join("1" if won else "0" for won in (scores[0::2] > scores[1::2]).tolist())

    def marked(self, row: int) -> tuple[list[int], np.ndarray]:
        """Content tokens of an answer, and which of them share a visible character with a marked span."""
        ids, text = self.texts.rows.responses[row], self.texts.answers[row]
        spans = self.chat.cut_text(ids, list(range(len(ids) + 1)), text)[:-1]
        content = [j for j, (start, stop) in enumerate(spans) if stop > start]
        faults = [asdict(fault) for fault in self.texts.items[row].spans]
        ends = [spans[j][1] for j in content]
        return content, in_spans({"response": text, "faults": faults, "token_ends": ends})

    def aucs(self, tokens: Callable[[int], Tensor]) -> list[float | None]:
        """AUC of low reward for being marked, of each answer; `tokens` gives the reward of each of its tokens."""
        found = []
        for row in range(len(self.texts.items)):
            content, wrong = self.marked(row)
            auc = low_reward_auc(tokens(row)[content].numpy(), wrong)
            found.append(None if auc is None else round(auc, 4))
        return found

    def unit_aucs(self, values: Tensor, rule: str) -> list[float | None]:
        """The same, each token having its unit's reward."""
        rewards, ids = self.rewards(values, rule), self.cuts[rule].ids
        return self.aucs(lambda row: rewards[row][ids[row].clamp(min=0)])


@torch.no_grad()
def values_of(model: Any, part: Part) -> tuple[Tensor, Tensor]:
    """Return the head's reading after and before each response token."""
    use_states(model, part.held)
    rows = part.held.rows
    after = torch.zeros(len(rows), max(rows.lengths))
    before = torch.zeros_like(after)
    for batch in micro_batches(rows, 4096):
        found = prefix_values(model, model.score, rows.select(batch))
        for whole, some in zip((after, before), found, strict=True):
            whole[batch, : some.shape[1]] = some
    return after, before


def measure(values: dict[str, tuple[Tensor, Tensor]], parts: dict[str, Part], rule: str, kind: str) -> dict[str, Any]:
    """Right answers and AUCs of one trained reading."""
    after, before = values["spans"]
    return {
        "valid": parts["valid"].wins(values["valid"][0], rule, kind),
        "rewardbench": parts["rewardbench"].wins(values["rewardbench"][0], rule, kind),
        "auc": parts["spans"].unit_aucs(after, rule),
        "auc_prefix_difference": parts["spans"].aucs(lambda row: (after - before)[row]),
    }


def train(arm: str, seed: int, parts: dict[str, Part], args: argparse.Namespace) -> dict[str, Any]:
    """One LoRA run, measured."""
    rule, kind = ARMS[arm]
    begun = time.perf_counter()
    torch.manual_seed(seed)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=16, lora_alpha=32, target_modules="all-linear", exclude_modules=["score"],
        modules_to_save=["score"],
    )  # fmt: skip
    model: Any = get_peft_model(upper_model(args.model, args.upper), lora)
    card: Any = RewardModelCard(RULES[rule], args.model, "", "", aggregator=kind)  # type: ignore[arg-type]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=0.0)
    part, losses, curve = parts["train"], [], {}
    for step, chosen in enumerate(batches(min(args.train, len(part.texts.items)), BATCH, seed), 1):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / 5)
        use_states(model, part.held)
        rows = rows_of(chosen)
        conversations = part.held.rows.select(rows)
        cut = Segmentation(part.cuts[rule].ids[rows, : max(conversations.lengths)])
        with torch.autocast("cpu", torch.bfloat16):
            scores = read_units(model, conversations, cut, card).scores
        loss = preference_loss(scores[0::2], scores[1::2])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss), 4))
        if step * BATCH in CURVE:
            valid = parts["valid"].wins(values_of(merged(model), parts["valid"])[0], rule, kind)
            curve[step * BATCH] = valid
            print(f"{arm} {seed}: {step * BATCH} pairs, valid {share(valid):.3f}", flush=True)
    trained = time.perf_counter() - begun
    final = merged(model)
    values = {name: values_of(final, parts[name]) for name in ("valid", "rewardbench", "spans")}
    found = measure(values, parts, rule, kind)
    return {
        "arm": arm, "seed": seed, "learning_rate": args.learning_rate, "seconds_training": round(trained, 1),
        "seconds": round(time.perf_counter() - begun, 1), "losses": losses, "curve": curve, **found,
    }  # fmt: skip


def spread(flat: Tensor, part: Part) -> Tensor:
    """Lay values of response tokens out as [b, t]."""
    mask = part.texts.rows.mask
    return torch.zeros(mask.shape).masked_scatter(mask, flat)


def fit_frozen(rule: str, kind: str, size: int, seed: int, parts: dict[str, Part]) -> dict[str, Any]:
    """Fit a head on the frozen trunk's last states, for the seed's first pairs, and measure it."""
    part = parts["train"]
    rows = rows_of([i for chosen in batches(len(part.texts.items), BATCH, seed) for i in chosen][:size])
    cut = part.cuts[rule]
    columns = read_columns(cut, part.texts.rows.ended, "end")
    first = torch.tensor([0, *part.texts.rows.lengths]).cumsum(0)[:-1, None]
    unit_mask = cut.unit_mask[rows]
    states = part.held.last[(first + columns)[rows][unit_mask]].float()
    weight = fit_head(states, unit_mask, aggregator=kind, penalty=0.1)
    values = {}
    for name in ("valid", "rewardbench", "spans"):
        after = spread(parts[name].held.last.float() @ weight, parts[name])
        values[name] = (after, torch.cat([after[:, :1], after[:, :-1]], 1))  # the prompt's own state is not kept
    found = measure(values, parts, rule, kind)
    return {"rule": rule, "aggregator": kind, "size": size, "seed": seed, **found}


def runs_in(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, run: dict[str, Any]) -> None:
    """Keep a finished run."""
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")
    known = [auc for auc in run["auc"] if auc is not None]
    print(
        {key: value for key, value in run.items() if key in ("arm", "rule", "aggregator", "size", "seed", "seconds")},
        f"valid {share(run['valid']):.3f}, rewardbench {share(run['rewardbench']):.3f},",
        f"auc {sum(known) / len(known):.3f}", flush=True,
    )  # fmt: skip


def share(wins: str) -> float:
    """Share of pairs that were right."""
    return wins.count("1") / len(wins)


def prepare(args: argparse.Namespace) -> dict[str, Part]:
    """Read every text once and cut it by every rule; thresholds come from the training pairs."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(args.model))
    texts = read_texts(args, chat)
    model = None
    parts: dict[str, Part] = {}
    rules = dict(RULES)
    for name, held_texts in texts.items():
        key = hashlib.sha256(fingerprint(args, name).encode()).hexdigest()[:12]
        path = args.work / f"{name}-{key}.safetensors"
        if model is None and not path.exists():
            model = load_causal_lm(args.model)
        held = stored(model, held_texts.rows, args.upper, path, name)  # type: ignore[arg-type]
        if name == "train":
            rules["entropy"] = RULES["entropy"].resolve(held.entropy, held_texts.rows.mask)
        parts[name] = Part(held_texts, held, rules, chat)
        counts = {rule: round(float(cut.counts.float().mean()), 1) for rule, cut in parts[name].cuts.items()}
        print(f"{name}: {len(held_texts.items)} items, {len(held.lower)} tokens, units {counts}", flush=True)
    surprisal = parts["spans"].aucs(lambda row: parts["spans"].held.logprobs[row])
    subsets = [item.subset for item in texts["rewardbench"].items]
    lengths = [len(text) for text in texts["valid"].answers]
    longer = "".join("1" if a > b else "0" for a, b in zip(lengths[0::2], lengths[1::2], strict=True))
    record = {
        "settings": {name: value for name, value in vars(args).items() if name in (
            "model", "upper", "shares", "train", "valid", "rows", "pair_length", "bench_length", "spans_length",
            "learning_rate")} | {"files": [Path(file).name for file in args.files]},
        "units": {name: {r: float(c.counts.float().mean()) for r, c in p.cuts.items()} for name, p in parts.items()},
        "subsets": subsets, "auc_surprisal": surprisal, "valid_longer": longer,
    }  # fmt: skip
    (HERE / "data.json").write_text(json.dumps(record) + "\n")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--shares", nargs="+", type=int, required=True, help="Pairs to draw from each file.")
    parser.add_argument("--benchmark", required=True)
    parser.add_argument("--spans", required=True)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--upper", type=int, default=4, help="Layers that get LoRA, from the top.")
    parser.add_argument("--train", type=int, default=1200)
    parser.add_argument("--valid", type=int, default=400)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--pair_length", type=int, default=320)
    parser.add_argument("--bench_length", type=int, default=384)
    parser.add_argument("--spans_length", type=int, default=448)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--stage", choices=("lora", "frozen"), default="lora")
    parser.add_argument("--work", type=Path, default=Path("runs/lora_grid"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts = prepare(args)
    path = HERE / ("runs.jsonl" if args.stage == "lora" else "frozen.jsonl")
    if args.stage == "lora":
        done = {(run["arm"], run["seed"], run["learning_rate"]) for run in runs_in(path)}
        for seed in range(args.seeds):
            for arm in args.arms:
                if (arm, seed, args.learning_rate) not in done:
                    append(path, train(arm, seed, parts, args))
    else:
        done = {(run["rule"], run["aggregator"], run["size"], run["seed"]) for run in runs_in(path)}
        for seed in range(args.seeds):
            for size in SIZES[::-1]:
                for rule in RULES:
                    for kind in AGGREGATORS[:1] if rule == "response" else AGGREGATORS:
                        if (rule, kind, size, seed) not in done:
                            append(path, fit_frozen(rule, kind, size, seed, parts))


if __name__ == "__main__":
    main()
