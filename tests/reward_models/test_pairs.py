"""Pairs cut into units: rows in order, and thresholds resolved once."""

import pytest
import torch

from reward_models.pairs import readings_of, segment_pairs, segmenter_for, unit_states
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import PreferencePair
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


def test_token_ids_without_a_stop_token_are_unfinished(build_scorer):
    scorer = build_scorer("token")
    ids = scorer.chat.prompt_ids([{"role": "user", "content": "hi"}]), scorer.chat.response_ids("été"), [7, 8]
    unfinished = PreferencePair([], "", "", ids=(ids[0], ids[1][:-1], [*ids[2], scorer.chat.stop_id]))
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
    assert scorer.score([pair.prompt], ["abc"])[0].score == pytest.approx(rewards[0, :3].mean().item(), abs=1e-5)
