"""The README.md of a reward-model directory."""

from pathlib import Path
from typing import Any

from reward_models.segment_reward_model import RewardModelCard

_CARD = """---
base_model: {base_model}
library_name: transformers
pipeline_tag: text-classification
tags: [reward-model, dense-reward, segrew]
datasets: [{dataset}]
---

# Segment reward model on {base_model}

Trained with [segrew](https://pypi.org/project/segrew/) on {pairs} preference pairs of `{dataset}`.
Rewards are read at the end of each unit (rule `{rule}`); the score is their {aggregator}.

{accuracy}

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


def write_model_card(
    directory: Path, card: RewardModelCard, evaluation: dict[str, Any], *, dataset: str, pairs: int, pad_token_id: int
) -> None:
    """Write README.md with the run's own numbers.

    Args:
        pad_token_id: of the saved tokenizer; the reader of an adapter must name it, for the base may pad otherwise.
    """
    accuracy = "It was not evaluated on held-out pairs."
    if evaluation:
        low, high = evaluation["ci95"]
        accuracy = (
            f"Accuracy on {evaluation['n']} held-out pairs: {evaluation['accuracy']:.3f} (95 % interval {low:.3f} to "
            f'{high:.3f}); "the longer answer wins" scores {evaluation["length_baseline"]:.3f}.'
        )
    adapter = (directory / "adapter_config.json").exists()
    text = _CARD.format(
        base_model=card.base_model,
        dataset=dataset,
        pairs=pairs,
        rule=card.segmentation.label,
        aggregator=card.aggregator,
        accuracy=accuracy,
        name=directory.name,
        options=f", num_labels=1, pad_token_id={pad_token_id}" if adapter else "",
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
