"""The README.md of a reward-model directory, written from the files beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.normalizers import LocationNormalizer
from segrew.run_directory import read_json, write_json

_BENCHMARK = "benchmark-{}.json"

_CARD = """---
{metadata}---

# Segment reward model on {base_model}

Trained with [segrew](https://pypi.org/project/segrew/) on {pairs} preference pairs of `{dataset}`.
{reading}

{accuracy}

{normalizer}
{benchmarks}
```python
from reward_models import SegmentRewardModel

model = SegmentRewardModel.from_pretrained("{name}")
scored = model.score([[{{"role": "user", "content": "Why is the sky blue?"}}]], ["Air scatters blue light most."])
for segment in scored[0].segments:
    print(f"{{segment.reward:+.2f}} {{segment.text!r}}")
```

Plain `AutoModelForSequenceClassification.from_pretrained("{name}"{options})` gives one number, the reading at the stop
token; the text must end there. The segment rewards need segrew, which reads `segrew.json` beside the weights.
"""


def write_model_card(directory: Path) -> None:
    """Write README.md with the run's own numbers."""
    (directory / "README.md").write_text(render_model_card(directory), encoding="utf-8")


@contextmanager
def model_card_kept_up(directory: Path) -> Iterator[None]:
    """Write README.md again after a change to the files it tells of, unless somebody has edited it."""
    path = directory / "README.md"
    ours = (
        path.is_file()
        and (directory / CARD_FILE).is_file()
        and path.read_text(encoding="utf-8") == render_model_card(directory)
    )
    yield
    if ours:
        write_model_card(directory)


def keep_benchmark(directory: Path, results: dict[str, Any]) -> None:
    """Leave a benchmark's results in the reward-model directory, and in its README.md."""
    with model_card_kept_up(directory):
        write_json(directory / _BENCHMARK.format(results["benchmark"]), results)


def render_model_card(directory: Path) -> str:
    """Return the README.md that the files of a reward-model directory amount to."""
    card, evaluation = RewardModelCard.load(directory), _read(directory / "evaluation.json")
    benchmarks = [read_json(path) for path in sorted(directory.glob(_BENCHMARK.format("*")))]
    adapter = (directory / "adapter_config.json").exists()
    pad_token_id = _read(directory / "config.json").get("pad_token_id")
    if adapter:  # its reader must name the padding, for the base may pad otherwise
        pad_token_id = _pad_token_id(directory)
    metadata = _metadata(directory, card, evaluation, benchmarks, adapter)
    return _CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        base_model=card.base_model,
        dataset=evaluation.get("dataset", "an unknown source"),
        pairs=evaluation.get("train_pairs", "some"),
        reading=_reading(card),
        accuracy=_accuracy(evaluation),
        normalizer=_normalizer(directory, card),
        benchmarks="".join(_benchmark_table(results) for results in benchmarks),
        name=evaluation.get("repository", directory.name),
        options=f", num_labels=1, pad_token_id={pad_token_id}" if adapter else "",
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _pad_token_id(directory: Path) -> int:
    from segrew.language_models import load_tokenizer

    return load_tokenizer(str(directory)).pad_token_id


def _metadata(
    directory: Path, card: RewardModelCard, evaluation: dict[str, Any], benchmarks: list[dict[str, Any]], adapter: bool
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["reward-model", "dense-reward", "segrew"],
    }
    if _is_hub_name(card.base_model):
        metadata["base_model"] = card.base_model
    if _is_hub_name(evaluation.get("dataset")):
        metadata["datasets"] = [evaluation["dataset"]]
    results = [_result(name, value, source) for name, value, source in _numbers(evaluation, benchmarks)]
    if results:
        metadata["model-index"] = [{"name": directory.name, "results": results}]
    return metadata


def _is_hub_name(name: str | None) -> bool:
    """Whether a name can be one of the hub's: no local path, which the hub would refuse in metadata."""
    return name is not None and name.count("/") == 1 and not Path(name).exists() and not Path(name).is_absolute()


def _numbers(evaluation: dict[str, Any], benchmarks: list[dict[str, Any]]) -> Iterator[tuple[str, float, str]]:
    """Yield (what, accuracy, data set) of everything that was measured."""
    if "accuracy" in evaluation:
        yield "accuracy on held-out pairs", evaluation["accuracy"], evaluation["eval_dataset"]
    for results in benchmarks:
        source = results["settings"]["dataset"]
        for section, entry in results["sections"].items():
            yield f"{results['benchmark']} {section}", entry["accuracy"], source
        if results["overall"] is not None:
            yield f"{results['benchmark']} overall", results["overall"], source


def _result(name: str, value: float, source: str) -> dict[str, Any]:
    return {
        "task": {"type": "text-classification", "name": "preference"},
        "dataset": {"name": source, "type": source if _is_hub_name(source) else "local"},
        "metrics": [{"type": "accuracy", "name": name, "value": round(value, 4)}],
    }


def _reading(card: RewardModelCard) -> str:
    return (
        f"Rewards are read at the end of each unit (rule `{card.segmentation.label}`, read position "
        f"`{card.read_position}`); the score is their {card.aggregator}."
    )


def _accuracy(evaluation: dict[str, Any]) -> str:
    if "accuracy" not in evaluation:
        return "It was not evaluated on held-out pairs."
    low, high = evaluation["ci95"]
    return (
        f"Accuracy on {evaluation['n']} held-out pairs: {evaluation['accuracy']:.3f} (95 % interval {low:.3f} to "
        f'{high:.3f}); "the longer answer wins" scores {evaluation["length_baseline"]:.3f}.'
    )


def _normalizer(directory: Path, card: RewardModelCard) -> str:
    path = directory / "normalizer.json"
    if not path.is_file() and card.segmentation.rule == "response":
        return "One reward a response needs no normalizer by location."
    if not path.is_file():
        return "It has no normalizer yet, which dense-reward PPO needs: `segrew calibrate`."
    mean, spread = LocationNormalizer.load(path).formulas
    return f"A reward at location p is standardized by mean {mean} and spread {spread} (`normalizer.json`)."


def _benchmark_table(results: dict[str, Any]) -> str:
    rows = [f"| {name} | {entry['n']} | {entry['accuracy']:.3f} |" for name, entry in results["sections"].items()]
    subsets = results["subsets"]
    n = subsets["all"]["n"] if "all" in subsets else sum(entry["n"] for entry in subsets.values())
    if results["overall"] is not None:
        rows.append(f"| overall | {n} | {results['overall']:.3f} |")
    return "\n".join(["", f"| {results['benchmark']} | n | accuracy |", "|---|---|---|", *rows, ""])
