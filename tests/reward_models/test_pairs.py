"""Pairs cut into units: rows in order, thresholds resolved once, and scores equal to those of the reward model."""

import json

import pytest
import torch

from reward_models.pairs import readings_of, score_pairs, segment_pairs, segmenter_for, unit_states
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import PreferencePair, load_preferences
from segrew.segmentation import SegmentationConfig, read_columns


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return ChatFormat.from_tokenizer(load_tokenizer(str(tiny_dir))), load_causal_lm(str(tiny_dir))


def test_rows_are_chosen_and_rejected_of_each_pair_in_turn(tiny, short_pairs):
    chat, model = tiny
    data = segment_pairs(short_pairs, chat, SegmentationConfig(quantile=0.7), model, max_length=256)
    assert len(data) == len(short_pairs) and len(data.conversations) == 2 * len(short_pairs)
    for i, pair in enumerate(short_pairs):
        _, encoded, units = data[i]
        assert data.conversations.responses[2 * i : 2 * i + 2] == [encoded.chosen, encoded.rejected]
        assert chat.decode(encoded.chosen) == pair.chosen and chat.decode(encoded.rejected) == pair.rejected
        assert torch.equal(units, data.segmentation.ids[2 * i : 2 * i + 2])
        assert (units >= 0).sum(1).tolist() == [len(encoded.chosen), len(encoded.rejected)]


def test_a_quantile_is_the_quantile_of_the_training_entropies(tiny, short_pairs):
    chat, model = tiny
    data = segment_pairs(short_pairs, chat, SegmentationConfig(quantile=0.7), model, max_length=256)
    inner = [data.features.entropy[row, 1:n] for row, n in enumerate(data.conversations.lengths)]
    assert data.rule.threshold == pytest.approx(torch.cat(inner).quantile(0.7).item(), abs=1e-5)


def test_b16_equal_rows_are_left_out_of_training_and_kept_for_evaluation(build_byte_tokenizer):
    chat = ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")
    text, user = "a" * 80, [{"role": "user", "content": "pppp"}]
    others = ["b" + text[1:], text, text[:60] + "b" * 20, text[:35] + "b" + text[36:]]
    pairs = [PreferencePair(user, text, other, str(i)) for i, other in enumerate(others)]
    rule = SegmentationConfig(rule="token")
    assert [p.id for p in segment_pairs(pairs, chat, rule, None, max_length=40).pairs] == ["0", "3"]
    assert len(segment_pairs(pairs, chat, rule, None, max_length=40, for_training=False)) == 4
    data = segment_pairs(pairs, chat, rule, None, max_length=40)
    assert data.fitted == {
        "pairs left out: identical within --max_length": 2,
        "pairs with answer cut to --max_length": 2,
    }
    with pytest.raises(
        ValueError, match=r"0 of 2 pairs are left within --max_length 40 tokens \(2 pairs left out: iden"
    ):
        segment_pairs(pairs[1:3], chat, rule, None, max_length=40)


@pytest.mark.parametrize("position", ["end", "content"])
def test_unit_states_are_those_at_the_read_columns(tiny, short_pairs, position):
    chat, model = tiny
    rule = SegmentationConfig(quantile=0.7)
    data = segment_pairs(short_pairs[:3], chat, rule, model, max_length=256, with_states=True)
    states, unit_mask = unit_states(data, position)
    columns = read_columns(data.segmentation, data.conversations.ended, position)
    k = 0
    for row, count in enumerate(data.segmentation.counts.tolist()):
        ids = data.conversations.prompts[row] + data.conversations.responses[row]
        with torch.no_grad():
            alone = model.model(torch.tensor([ids])).last_hidden_state[0]
        for unit in range(count):
            place = len(data.conversations.prompts[row]) + int(columns[row, unit])
            torch.testing.assert_close(states[k], alone[place], atol=1e-4, rtol=1e-4)
            k += 1
    assert k == len(states) == int(unit_mask.sum())


@pytest.mark.parametrize("rule, frozen", [("entropy", True), ("response", True), ("token", False), ("entropy", False)])
def test_scores_of_pairs_are_those_of_the_reward_model(build_scorer, short_pairs, rule, frozen):
    threshold = 3.3 if rule == "entropy" else None
    scorer = build_scorer(rule, threshold=threshold, trunk_is_segmenter=frozen, max_length=512)
    if frozen:
        scorer.model.model.load_state_dict(scorer.segmenter().model.state_dict())
    pairs = [*short_pairs[:3], PreferencePair(short_pairs[0].prompt, "same", "same")]
    scored = score_pairs(scorer, pairs, max_tokens=60)
    for pair, found in zip(pairs, scored, strict=True):
        chosen, rejected = scorer.score([pair.prompt] * 2, [pair.chosen, pair.rejected])
        assert found.pair is pair
        for one, other in ((found.chosen, chosen), (found.rejected, rejected)):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert [s.text for s in one.segments] == [s.text for s in other.segments]
            assert [s.reward for s in one.segments] == pytest.approx([s.reward for s in other.segments], abs=1e-4)
    assert scored[-1].chosen.score == scored[-1].rejected.score


@pytest.mark.parametrize("overlong", ["truncate_prompt_left", "truncate_response"])
def test_one_answer_has_one_score_whatever_stands_beside_it(build_scorer, overlong):
    scorer = build_scorer("token", max_length=24, overlong=overlong)
    prompt, answer = [{"role": "user", "content": "".join(map(chr, range(65, 85)))}], "abcd"
    others = ["x", "y" * 12, "z" * 40]
    (alone,) = scorer.score([prompt], [answer])
    scored = score_pairs(scorer, [PreferencePair(prompt, answer, other) for other in others])
    assert [pair.chosen.score for pair in scored] == pytest.approx([alone.score] * 3, abs=1e-6)
    assert alone.cut == ("prompt",) and [pair.cut for pair in scored][-1] == {"prompt", "answer"}
    assert scored[0].pair.chosen == answer and scored[2].rejected.segments[-1].end == 40


def test_b17_repeated_ids_and_other_columns_give_a_result_each(build_scorer, tmp_path):
    good = {"prompt": "x", "chosen": "a", "rejected": "b", "id": 7}
    rows = [good, good | {"rejected": None}, good | {"meta": {"a": 1}, "none": None, "rate": 0.5}, good]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = load_preferences(str(tmp_path / "a.jsonl"), keep_identical=True).pairs
    scored = score_pairs(build_scorer("token"), pairs)
    assert [pair.pair.id for pair in scored] == ["7"] * 3
    assert [pair.chosen.score for pair in scored] == pytest.approx([scored[0].chosen.score] * 3, abs=1e-5)


def test_token_ids_score_like_their_text(build_scorer):
    scorer = build_scorer("token")
    prompt, text = [{"role": "user", "content": "hi"}], "été"
    ids = scorer.chat.prompt_ids(prompt), scorer.chat.response_ids(text), scorer.chat.response_ids("no")
    pair, same = score_pairs(scorer, [PreferencePair(prompt, text, "no"), PreferencePair([], "", "", ids=ids)])
    assert same.chosen.score == pytest.approx(pair.chosen.score, abs=1e-6) and same.pair.chosen == text
    assert [s.text for s in same.chosen.segments] == [s.text for s in pair.chosen.segments]
    unfinished = PreferencePair([], "", "", ids=(ids[0], ids[1][:-1], ids[2]))
    data = segment_pairs([unfinished], scorer.chat, scorer.segmentation, None, max_length=64)
    assert data.conversations.ended.tolist() == [False, True]


def test_rules_that_need_no_model_load_none(build_scorer):
    scorer = build_scorer("token")
    scorer = SegmentRewardModel(scorer.model, scorer.chat, scorer.card)  # its segmenter is nowhere to be found
    assert segmenter_for(scorer) is None
    pair = PreferencePair([{"role": "user", "content": "x"}], "abc", "d")
    data = segment_pairs([pair], scorer.chat, scorer.segmentation, None, max_length=64)
    rewards = readings_of(scorer, data).rewards
    assert rewards[0, 3:].abs().sum() == 0 == rewards[1, 1:].abs().sum()
    assert score_pairs(scorer, [pair])[0].chosen.score == pytest.approx(rewards[0, :3].mean().item(), abs=1e-5)
