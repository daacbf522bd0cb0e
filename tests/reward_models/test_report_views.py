import random

import pytest

from reward_models.report_runs import RunFiles
from reward_models.report_views import FEATURED, MORE, MOST_SEGMENTS, answers


def row(response, rewards, score, *, side=None, prompt="Why?", identity="p1", normalized=True):
    """A row of scores.jsonl whose segments are equal parts of the response."""
    size = len(response) // len(rewards)
    segments = [
        {"text": response[i * size : (i + 1) * size], "start": i * size, "end": (i + 1) * size, "tokens": size}
        | {"reward": z, "normalized": z if normalized else None}
        for i, z in enumerate(rewards)
    ]
    held = {"id": identity, "prompt": prompt, "response": response, "score": score, "segments": segments}
    return held | ({"side": side} if side else {})


def pair(chosen, rejected, **about):
    return [
        row("aabb", [1.0, 0.0], chosen, side="chosen", **about),
        row("cccc", [-1.0], rejected, side="rejected", **about),
    ]


def test_models_that_scored_the_same_texts_stand_side_by_side_each_on_its_own_scale():
    one = RunFiles("one", answers=pair(2.0, 1.0))
    # The other model cuts elsewhere, has no normalizer, and the file is in another order under other ids.
    other = [row("cccc", [9.0, 5.0], 0.5, side="rejected", identity="x", normalized=False)]
    other.append(row("aabb", [7.0], 0.2, side="chosen", identity="x", normalized=False))
    (view,) = answers([one, RunFiles("two", answers=other)])
    (group,) = view["shown"]
    chosen, rejected = group["rows"]
    assert [(name, answer.score, answer.side) for name, answer in chosen] == [
        ("one", 2.0, "chosen"),
        ("two", 0.2, "chosen"),
    ]
    assert [(name, answer.score) for name, answer in rejected] == [("one", 1.0), ("two", 0.5)]
    assert [span.level for span in chosen[0][1].spans] == [2, 0]
    assert [span.level for span in rejected[1][1].spans] == [2, -2]  # 9 and 5 about 7, spread 1.63
    assert group["verdicts"] == [("one", "right"), ("two", "wrong")]
    assert "same verdict on 0 of 1 pairs" in view["agreement"][0]
    assert [note.split(":")[0] for note in view["scales"]] == ["one", "two"]


def test_one_model_has_a_pair_in_one_row_and_no_names():
    (view,) = answers([RunFiles("one", answers=pair(2.0, 1.0))])
    (sides,) = view["shown"][0]["rows"]
    assert [(name, answer.side) for name, answer in sides] == [("", "chosen"), ("", "rejected")]
    assert view["shown"][0]["verdicts"] == [("", "right")] and view["agreement"] == []


def test_the_correlation_of_scores_is_that_of_the_shared_answers():
    texts = [f"answer {i}" for i in range(5)]
    scores = [[1.0, 2.0, 3.0, 4.0, 100.0], [2.0, 1.0, 4.0, 3.0]]
    runs = [
        RunFiles(name, answers=[row(t, [0.0], s, identity=t) for t, s in zip(texts, held, strict=False)])
        for name, held in zip("ab", scores, strict=True)
    ]
    (view,) = answers(runs)
    assert "correlation of scores 0.60 (" in view["agreement"][0] and "over 4 answers" in view["agreement"][0]
    assert view["unshared"] == [("a", 5)]
    flat = [RunFiles(name, answers=[row(t, [0.0], 1.0) for t in texts]) for name in "ab"]
    assert "not defined" in answers(flat)[0]["agreement"][0]


def test_a_stray_common_answer_does_not_join_two_sets():
    one = [row(f"one {i}", [0.0], 0.0, identity=str(i)) for i in range(4)]
    two = [row(f"two {i}", [0.0], 0.0, identity=str(i)) for i in range(4)]
    views = answers([RunFiles("one", answers=one), RunFiles("two", answers=[*two, one[0]])])
    assert [(view["name"], view["total"]) for view in views] == [("one", 4), ("two", 5)]


def test_pairs_that_share_an_answer_keep_it_each():
    (view,) = answers([RunFiles("one", answers=[*pair(2.0, 1.0), *pair(2.0, 1.0, identity="p2")])])
    assert view["total"] == 2
    assert all(len(group["rows"][0]) == 2 for group in view["shown"])


def test_scores_of_whole_answers_are_shown_without_colours():
    held = [
        {"id": "p", "prompt": "Why?", "response": "abc", "score": s, "side": side}
        for s, side in ((1, "chosen"), (2, "rejected"))
    ]
    (view,) = answers([RunFiles("one", answers=held)])
    assert not view["coloured"] and "no rewards of segments" in view["scales"][0]
    assert view["shown"][0]["verdicts"] == [("", "wrong")]


@pytest.mark.parametrize("segments", [1, 2000])
def test_a_page_holds_so_many_answers_and_segments(segments):
    random.seed(0)
    held = [row("ab " * segments, [0.0] * segments, random.random(), identity=str(i)) for i in range(60)]
    for i, one in enumerate(held):
        one["response"] += str(i)
    (view,) = answers([RunFiles("one", answers=held)])
    drawn = min(FEATURED + MORE, MOST_SEGMENTS // segments)
    assert view["total"] == 60 and len(view["shown"]) + len(view["more"]) == drawn


@pytest.mark.parametrize(("score", "names"), [(2.001, "one"), (2.5, "one · its training")])
@pytest.mark.parametrize("turned", [False, True])
def test_whole_scores_that_only_repeat_a_models_segments_are_left_out(score, names, turned):
    whole = [answer | {"segments": []} for answer in pair(score, 1.0)]
    runs = [RunFiles("one", answers=pair(2.0, 1.0)), RunFiles("its training", answers=whole)]
    (view,) = answers(runs[::-1] if turned else runs)
    assert sorted(view["name"].split(" · ")) == sorted(names.split(" · "))
