"""Items scored: the reward model's own scores, equal answers once, cuts counted."""

import pytest

from reward_models.benchmark_items import Item, item_of_pair, score_items
from segrew.preferences import PreferencePair

USER = [{"role": "user", "content": "pppp"}]


@pytest.mark.parametrize("rule, frozen", [("entropy", True), ("response", True), ("token", False), ("entropy", False)])
def test_scores_are_those_of_the_reward_model(build_scorer, short_pairs, rule, frozen):
    threshold = 3.3 if rule == "entropy" else None
    scorer = build_scorer(rule, threshold=threshold, trunk_is_segmenter=frozen, max_length=512)
    if frozen:
        scorer.model.model.load_state_dict(scorer.segmenter().model.state_dict())
    items = [item_of_pair(pair) for pair in short_pairs[:2]]
    items.append(Item("3", "s", short_pairs[0].prompt, ["one", "two", "three and more", "one"], 2))
    for batch_size in (1, 3, 16):
        scored = score_items(scorer, items, batch_size=batch_size)
        for item, found in zip(items, scored, strict=True):
            alone = scorer.score([item.prompt] * len(item.answers), item.answers)
            for one, other in zip(found.answers, alone, strict=True):
                assert one.score == pytest.approx(other.score, abs=1e-4)
                assert [s.text for s in one.segments] == [s.text for s in other.segments]
        assert scored[2].answers[0].score == scored[2].answers[3].score  # exactly: it was read once


def test_a_row_of_scores_says_what_it_is_about(build_scorer):
    scorer = build_scorer("token", max_length=64)
    pair = PreferencePair(USER, "abc", "defgh", "7", "hep-go")
    (row,) = (scored.row() for scored in score_items(scorer, [item_of_pair(pair)]))
    assert row["scores"] == [row["score_chosen"], row["score_rejected"]]
    assert (row["id"], row["subset"], row["correct"], row["truncated"]) == ("7", "hep-go", 1, False)
    assert row["tokens"] == [4, 6] and row["units"] == [3, 5]  # bytes and a stop token, which joins the last unit
    other = item_of_pair(PreferencePair(USER, "abc", "defgx", "7", "hep-go"))
    assert row["digest"] == item_of_pair(pair).digest != other.digest


@pytest.mark.parametrize(
    ("prompt", "answers", "truncated"),
    [("pppp", ["a" * 20, "b"], False), ("pppp", ["a" * 60, "b"], True), ("p" * 60, ["a", "b"], True)],
)
def test_rows_that_lose_tokens_are_counted(build_scorer, prompt, answers, truncated):
    scorer = build_scorer("response", max_length=40)
    item = Item("1", "", [{"role": "user", "content": prompt}], answers)
    assert score_items(scorer, [item])[0].truncated is truncated
