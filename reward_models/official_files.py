"""RewardBench's own result files, for its leaderboard and the scripts around it (allenai/reward-bench)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward_models.benchmark_credit import Row
from reward_models.benchmark_items import Item
from reward_models.rewardbench_sections import PRIOR_SETS
from segrew.chat import ChatFormat
from segrew.run_directory import write_json


def write_official_files(
    directory: Path, name: str, items: Sequence[Item], rows: Sequence[Row], chat: ChatFormat
) -> None:
    """Write `eval-set/NAME.json` (accuracy by subset) and `eval-set-scores/NAME.json` (columns over rows).

    Rows of the prior sets go to `pref-sets/` and `pref-sets-scores/`, as there.

    Args:
        name: of the model, org/model.
    """
    about = {"model": name, "model_type": "Seq. Classifier", "chat_template": "tokenizer"}
    for kind, is_prior in (("eval-set", False), ("pref-sets", True)):
        held = [pair for pair in zip(items, rows, strict=True) if (pair[0].subset in PRIOR_SETS) == is_prior]
        if held:
            columns = _columns(held, chat)
            _write(directory / kind / f"{name}.json", about | _accuracies(columns))
            _write(directory / f"{kind}-scores" / f"{name}.json", columns | about)


def _columns(held: Sequence[tuple[Item, Row]], chat: ChatFormat) -> dict[str, list]:
    stop = chat.tokenizer.decode([chat.stop_id])
    chosen, rejected = ([row["scores"][side] for _, row in held] for side in (0, 1))
    prompts = [chat.render(item.prompt, item.template) if item.prompt else "" for item, _ in held]
    texts = [[prompt + item.answers[k] + stop for prompt, (item, _) in zip(prompts, held, strict=True)] for k in (0, 1)]
    return {
        "text_chosen": texts[0],
        "text_rejected": texts[1],
        "results": [int(a > b) for a, b in zip(chosen, rejected, strict=True)],
        "subset": [item.subset for item, _ in held],
        "id": [int(item.id) if item.id.isdigit() else item.id for item, _ in held],
        "scores_chosen": chosen,
        "scores_rejected": rejected,
    }


def _accuracies(columns: dict[str, list]) -> dict[str, float]:
    results: dict[str, list[int]] = {}
    for subset, result in zip(columns["subset"], columns["results"], strict=True):
        results.setdefault(subset, []).append(result)
    return {subset: sum(held) / len(held) for subset, held in results.items()}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
