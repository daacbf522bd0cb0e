"""Items scored: the reward model's own scores, equal answers once, cuts counted."""

import json

import pytest

from reward_models.benchmark_items import Item, item_of_pair, score_items, with_text
from reward_models.benchmark_readers import pair_item, read_items
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
    for max_tokens in (1, 60, 4096):
        scored = score_items(scorer, items, max_tokens=max_tokens)
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
    assert (row["id"], row["subset"], row["correct"], row["cut"]) == ("7", "hep-go", 1, [])
    assert row["tokens"] == [4, 6] and row["units"] == [3, 5]  # bytes and a stop token, which joins the last unit
    other = item_of_pair(PreferencePair(USER, "abc", "defgx", "7", "hep-go"))
    assert row["digest"] == item_of_pair(pair).digest != other.digest


@pytest.mark.parametrize("overlong", ["truncate_prompt_left", "truncate_response"])
def test_one_answer_has_one_score_whatever_stands_beside_it(build_scorer, overlong):
    scorer = build_scorer("token", max_length=24, overlong=overlong)
    prompt, answer = [{"role": "user", "content": "".join(map(chr, range(65, 85)))}], "abcd"
    others = ["x", "y" * 12, "z" * 40]
    (alone,) = scorer.score([prompt], [answer])
    scored = score_items(scorer, [Item("", "", prompt, [answer, other]) for other in others])
    assert [one.answers[0].score for one in scored] == pytest.approx([alone.score] * 3, abs=1e-6)
    assert alone.cut == ("prompt",) and [one.cut for one in scored][-1] == ["answer", "prompt"]
    assert scored[2].answers[1].segments[-1].end == 40


def test_b17_repeated_ids_and_other_columns_give_a_result_each(build_scorer, tmp_path):
    good = {"prompt": "x", "chosen": "a", "rejected": "b", "id": 7}
    rows = [good, good | {"rejected": None}, good | {"meta": {"a": 1}, "none": None, "rate": 0.5}, good]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items, (source,) = read_items(str(tmp_path / "a.jsonl"), "train", pair_item)
    scored = score_items(build_scorer("token"), items)
    assert [one.item.id for one in scored] == ["7"] * 3 and source.skipped == {"empty answer": 1}
    assert [one.answers[0].score for one in scored] == pytest.approx([scored[0].answers[0].score] * 3, abs=1e-5)


def test_token_ids_score_like_their_text(build_scorer):
    scorer = build_scorer("token")
    prompt, text = [{"role": "user", "content": "hi"}], "été"
    ids = scorer.chat.prompt_ids(prompt), scorer.chat.response_ids(text), scorer.chat.response_ids("no")
    items = [Item("1", "", prompt, [text, "no"]), item_of_pair(PreferencePair([], "", "", ids=ids))]
    items[1] = with_text(items[1], scorer.chat)
    pair, same = score_items(scorer, items)
    assert [a.score for a in same.answers] == pytest.approx([a.score for a in pair.answers], abs=1e-6)
    assert items[1].answers == [text, "no"] and with_text(items[0], scorer.chat) is items[0]
    assert [s.text for s in same.answers[0].segments] == [s.text for s in pair.answers[0].segments]


def test_a_score_that_is_no_number_is_no_result(build_scorer):
    scorer = build_scorer("token")
    scorer.head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="gave the score nan to"):
        score_items(scorer, [item_of_pair(PreferencePair([{"role": "user", "content": "hi"}], "yes", "no"))])
