"""Answers with the reward of each of their units, as lines of samples.jsonl."""

from typing import Any

from policy.readings import Answered, RewardSource, Scores, segment_texts
from segrew.chat import ChatFormat


def sample_rows(
    step: int,
    split: str,
    answered: Answered,
    scores: Scores,
    sources: list[RewardSource],
    chat: ChatFormat,
    count: int,
) -> list[dict[str, Any]]:
    """Describe the first answers of a batch, by the units of the first source of reward."""
    reading, lines = scores.readings[0], []
    texts = segment_texts(chat, answered.conversations, reading.segmentation)
    lengths, locations = reading.segmentation.lengths.tolist(), reading.segmentation.locations.tolist()
    raw, rewards, totals = reading.raw.tolist(), reading.rewards.tolist(), scores.scores.tolist()
    normalizes = sources[0].normalizer is not None
    for row in range(min(count, len(texts))):
        segments = [
            {
                "text": text,
                "start": start,
                "end": end,
                "tokens": lengths[row][k],
                "reward": raw[row][k],
                "normalized": rewards[row][k] if normalizes else None,
                "location": locations[row][k],
            }
            for k, (text, (start, end)) in enumerate(texts[row])
        ]
        line = {
            "step": step,
            "split": split,
            "prompt": answered.prompts[row].messages[-1]["content"],
            "response": "".join(segment["text"] for segment in segments),
            "score": totals[row],
            "segments": segments,
        }
        if len(sources) > 1:
            line["sources"] = {r.source: r.scores[row].item() for r in scores.readings}
        lines.append(line)
    return lines
