"""Readings at unit ends: the right token, in any company, the same as an ordinary reward model at the stop token."""

import random
import shutil

import pytest
import torch
import transformers

from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.reading import at_units, read_head, read_tokens
from reward_models.segment_reward_model import NORMALIZER_FILE
from segrew import segmenter
from segrew.conversations import Conversations, response_states, response_statistics
from segrew.language_models import model_fingerprint
from segrew.run_directory import read_json, write_json
from segrew.segmentation import segment, segment_by_ngram, segment_by_response, segment_by_token
from segrew.segmenter import response_features

TEXTS = ["".join(random.Random(n).choices("abcdefgh ,.é", k=n)) for n in (1, 2, 7, 20, 40, 60)]
PROMPTS = [[{"role": "user", "content": f"question {i % 4}?"}] for i in range(6)]


def head_at(scorer: SegmentRewardModel, ids: list[int], place: int) -> float:
    """The head's output at one token of an unpadded row: what a reading must be."""
    with torch.no_grad():
        return scorer.model.score(scorer.model.model(torch.tensor([ids])).last_hidden_state[0, place]).item()


def test_b01_the_end_of_a_row_comes_from_lengths_not_from_ids(build_scorer, build_byte_tokenizer, build_scorer_config):
    """Pad token = end token, an end token inside the prompt and at the very end."""
    config = build_scorer_config(pad_token_id=2)
    scorer = build_scorer(tokenizer=build_byte_tokenizer(pad="</s>"), config=config)
    row = [10, 2, 11, 12, 2]
    rows = Conversations([row[:2], [5]], [row[2:], [9] * 8], torch.tensor([True, False]))  # a longer partner
    for layout in ("packed", "padded"):
        states = response_states(scorer.model, rows, layout=layout)
        rewards = states.spread(read_head(scorer.head, states.at)).gather(1, segment_by_response(rows.mask).ends)
        assert rewards[0, 0].item() == pytest.approx(head_at(scorer, row, 4), abs=1e-5)
    wrong = [head_at(scorer, row, place) for place in (0, 3)]
    assert all(abs(rewards[0, 0].item() - value) > 1e-3 for value in wrong)


def test_b02_padding_side_and_content_do_not_exist(build_scorer):
    """Rows have no padding of their own; beside longer rows on either side of the batch nothing shifts."""
    scorer = build_scorer("token")
    row = Conversations([[10]], [[11, 12]], torch.tensor([False]))
    alone = scorer.read(row, segment_by_token(row.mask)).rewards[0]
    expected = [head_at(scorer, [10, 11, 12], place) for place in (1, 2)]
    assert alone.tolist() == pytest.approx(expected, abs=1e-5)
    for order in ([[11, 12], [7] * 9], [[7] * 9, [11, 12]]):
        rows = Conversations([[10], [10]], order, torch.tensor([False, False]))
        found = scorer.read(rows, segment_by_token(rows.mask)).rewards[order.index([11, 12])]
        assert found[:2].tolist() == pytest.approx(expected, abs=1e-5) and found[2:].abs().sum() == 0


@pytest.mark.parametrize("rule, threshold", [("entropy", 3.3), ("token", None), ("response", None)])
def test_b05_a_score_does_not_depend_on_batch_size_or_order(build_scorer, rule, threshold):
    scorer = build_scorer(rule, threshold=threshold)
    alone = scorer.score(PROMPTS, TEXTS, batch_size=1)
    assert len({record.score for record in alone}) == 6
    for size in (2, 3, 6):
        for order in (range(6), range(5, -1, -1)):
            found = scorer.score([PROMPTS[i] for i in order], [TEXTS[i] for i in order], batch_size=size)
            for i, record in zip(order, found, strict=True):
                assert record.score == pytest.approx(alone[i].score, abs=1e-5)
                assert [s.text for s in record.segments] == [s.text for s in alone[i].segments]


def test_a_score_does_not_depend_on_the_budget_of_a_pass(build_scorer):
    scorer = build_scorer("entropy", threshold=3.3)
    alone = scorer.score(PROMPTS, TEXTS, max_tokens=1)
    for max_tokens in (30, 100, 8192):
        found = scorer.score(PROMPTS, TEXTS, max_tokens=max_tokens)
        assert [r.score for r in found] == pytest.approx([r.score for r in alone], abs=1e-5)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("Qwen3", {"head_dim": 8}),
        ("Mistral", {"sliding_window": 4}),
        ("Phi3", {"sliding_window": 3}),
        ("Gemma2", {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.5}),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 4}),
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    ],
)
def test_unit_rewards_of_packed_rows_are_the_stock_classifier_s(build_scorer, build_scorer_config, family, changes):
    """Read by the stock model at each unit's end, with the row cut off there and alone."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(build_scorer_config(), name) for name in (*names, "num_key_value_heads", "pad_token_id")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | {"num_labels": 1} | changes)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    plain = build_scorer("token")
    scorer = SegmentRewardModel(model, plain.chat, plain.card)
    rows = Conversations(
        [[9, 8, 7]] * 2 + [[5]], [[11, 12, 13, 14, 15, 2], [16, 17], [18, 2]], torch.tensor([True] * 3)
    )
    units = segment_by_ngram(rows.mask, 2)
    with torch.no_grad():
        found = scorer.read(rows, units).rewards
        for b, response in enumerate(rows.responses):
            for k, end in enumerate(units.ends[b, : int(units.counts[b])].tolist()):
                stock = model(input_ids=torch.tensor([rows.prompts[b] + response[: end + 1]])).logits.item()
                assert found[b, k].item() == pytest.approx(stock, abs=1e-5)


def test_b05_no_pad_token_is_needed(build_scorer, build_byte_tokenizer):
    with_pad = build_scorer("token").score(PROMPTS, TEXTS)
    without = build_scorer("token", tokenizer=build_byte_tokenizer(pad=None)).score(PROMPTS, TEXTS)
    assert [r.score for r in without] == pytest.approx([r.score for r in with_pad], abs=1e-6)


def test_b05_bfloat16_trunk_has_a_float32_head(build_scorer):
    exact = build_scorer("token").score(PROMPTS, TEXTS)
    scorer = build_scorer("token")
    half = SegmentRewardModel(scorer.model.bfloat16(), scorer.chat, scorer.card)
    assert half.head.weight.dtype == torch.float32
    for size in (1, 6):
        found = half.score(PROMPTS, TEXTS, batch_size=size)
        assert [r.score for r in found] == pytest.approx([r.score for r in exact], abs=0.05)
    assert [r.score for r in half.score(PROMPTS, TEXTS, 1)] == pytest.approx([r.score for r in found], abs=0.01)


def test_response_mode_is_the_ordinary_reading_at_the_last_token(build_scorer):
    """Invariant 14, against stock pooling with a pad token that no row holds."""
    scorer = build_scorer("response")
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        ids = scorer.chat.prompt_ids(prompt) + scorer.chat.response_ids(text)
        (record,) = scorer.score([prompt], [text])
        with torch.no_grad():
            stock = scorer.model(input_ids=torch.tensor([ids])).logits.item()
        assert record.score == pytest.approx(stock, abs=1e-6) and len(record.segments) == 1


def test_response_mode_equals_a_last_token_head_bit_for_bit(build_scorer):
    scorer = build_scorer("response")
    rows = Conversations([[5, 6]] * 3, [[7, 8, 2], [9] * 9, [2]], torch.tensor([True, False, True]))
    states = response_states(scorer.model, rows)
    outputs = read_tokens(scorer.model, states.at, states.mask, scorer.card)
    found = at_units(outputs, rows.ended, segment_by_response(rows.mask), scorer.card)
    ends = torch.arange(3), torch.tensor([2, 8, 0])
    expected = states.spread(scorer.head(states.at))[ends]  # of fewer rows it may round otherwise
    assert torch.equal(found.rewards, expected) and torch.equal(found.scores, expected[:, 0])


def test_token_mode_is_the_mean_over_all_tokens(build_scorer):
    """Invariant 14; the stop token joins the token before it, which is then read at the stop token."""
    scorer = build_scorer("token")
    prompt, text = PROMPTS[0], "abcd"
    before, response = scorer.chat.prompt_ids(prompt), scorer.chat.response_ids(text)
    places = [len(before) + j for j in (0, 1, 2, 4)]
    expected = [head_at(scorer, before + response, place) for place in places]
    (record,) = scorer.score([prompt], [text])
    assert [s.reward for s in record.segments] == pytest.approx(expected, abs=1e-5)
    assert record.score == pytest.approx(sum(expected) / 4, abs=1e-5)
    assert [s.tokens for s in record.segments] == [1, 1, 1, 2]


def test_content_position_reads_the_last_unit_before_the_stop_token(build_scorer):
    scorer = build_scorer("response", read_position="content")
    ids = scorer.chat.prompt_ids(PROMPTS[0]) + scorer.chat.response_ids("abcd")
    assert scorer.score([PROMPTS[0]], ["abcd"])[0].score == pytest.approx(head_at(scorer, ids, len(ids) - 2), abs=1e-5)


@pytest.mark.parametrize(
    "aggregator, expected", [("sum", lambda r: r.sum()), ("softmax", lambda r: 0.5 * (r / 0.5).logsumexp(0))]
)
def test_the_card_s_aggregator_and_temperature_are_applied(build_scorer, aggregator, expected):
    scorer = build_scorer("token", aggregator=aggregator, temperature=0.5)
    (record,) = scorer.score([PROMPTS[0]], ["abcd"])
    rewards = torch.tensor([s.reward for s in record.segments])
    assert record.score == pytest.approx(expected(rewards).item(), abs=1e-5)


def test_entropy_units_are_cut_by_the_segmenter_and_rebuild_the_text(build_scorer):
    """Invariant 11; boundaries recomputed from the segmenter's entropies of each row alone."""
    scorer = build_scorer("entropy", threshold=3.3)
    for prompt, text, record in zip(PROMPTS, TEXTS, scorer.score(PROMPTS, TEXTS), strict=True):
        row = Conversations([scorer.chat.prompt_ids(prompt)], [scorer.chat.response_ids(text)], torch.tensor([True]))
        entropy = response_statistics(scorer.segmenter(), row)[1][0]
        n = row.lengths[0]
        starts_character = [byte & 0xC0 != 0x80 for byte in text.encode()] + [True]
        opens = {next(k for k in range(j, n) if starts_character[k]) for j in range(1, n - 1) if entropy[j] > 3.3}
        opens = sorted({0, *opens} - {n - 1})
        lengths = [b - a for a, b in zip(opens, [*opens[1:], n], strict=True)]
        assert [s.tokens for s in record.segments] == lengths
        assert "".join(s.text for s in record.segments) == text
        assert [s.location for s in record.segments] == pytest.approx([(k + 1) / len(opens) for k in range(len(opens))])
        assert all(text[s.start : s.end] == s.text for s in record.segments)
    assert any(len(record.segments) > 2 for record in scorer.score(PROMPTS, TEXTS))


def test_a_reading_does_not_see_later_tokens(build_scorer):
    """Invariant 16."""
    scorer = build_scorer("token")
    rewards = [[s.reward for s in scorer.score([PROMPTS[0]], [text])[0].segments] for text in ("abcdef", "abcxyz12")]
    assert rewards[0][:3] == pytest.approx(rewards[1][:3], abs=1e-5)
    assert abs(rewards[0][3] - rewards[1][3]) > 1e-4


def test_a_trunk_that_is_the_segmenter_is_read_in_the_same_pass(build_scorer):
    scorer = build_scorer("entropy", threshold=3.3)
    scorer.model.model.load_state_dict(scorer.segmenter().model.state_dict())
    card = RewardModelCard(**vars(scorer.card) | {"trunk_is_segmenter": True})
    shared = SegmentRewardModel(scorer.model, scorer.chat, card, segmenter=scorer.segmenter())
    for one, other in zip(scorer.score(PROMPTS, TEXTS), shared.score(PROMPTS, TEXTS), strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_segmenter_s_pass_is_taken_from_the_cache(build_scorer, monkeypatch, tmp_path, frozen):
    """A second score runs no segmenter; what was cached for other weights or other texts is not read."""
    monkeypatch.setenv("SEGREW_CACHE", str(tmp_path))
    scorer = build_scorer("entropy", threshold=3.3, trunk_is_segmenter=frozen)
    if frozen:  # states are read, but only training adds them
        conversations = [scorer.encode(p, t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
        ids = [row.prompt for row in conversations], [row.response for row in conversations]
        rows = Conversations(*ids, torch.ones(6, dtype=torch.bool))
        response_features(scorer.segmenter(), rows, with_states=True)
    expected = [record.score for record in scorer.score(PROMPTS, TEXTS)]

    passes, run = [], segmenter.response_states
    monkeypatch.setattr(segmenter, "response_states", lambda m, rows: passes.append(len(rows)) or run(m, rows))
    assert [record.score for record in scorer.score(PROMPTS, TEXTS, batch_size=2)] == pytest.approx(expected, abs=1e-5)
    assert not passes
    scorer.score(PROMPTS, [text + "." for text in TEXTS])
    assert sum(passes) == 6
    with torch.no_grad():
        scorer.segmenter().lm_head.weight.mul_(2)
    card = RewardModelCard(**vars(scorer.card) | {"segmenter_fingerprint": model_fingerprint(scorer.segmenter())})
    other = SegmentRewardModel(scorer.model, scorer.chat, card, segmenter=scorer.segmenter())
    other.score(PROMPTS, TEXTS)
    assert sum(passes) == 12


def test_truncated_text_is_read_at_its_last_kept_token(build_scorer):
    scorer = build_scorer("response", max_length=16)
    prompt = [{"role": "user", "content": "p" * 30}]
    encoded = scorer.encode(prompt, "abcdefghijkl")
    prompt_ids, response_ids, ended = encoded.prompt, encoded.response, encoded.ended
    assert (len(prompt_ids), len(response_ids), ended) == (8, 8, False) and 2 not in response_ids
    record = scorer.score([prompt], ["abcdefghijkl"])[0]
    assert record.score == pytest.approx(head_at(scorer, prompt_ids + response_ids, 15), abs=1e-5)
    assert "".join(s.text for s in record.segments) == "abcdefghijkl"


def test_an_empty_response_is_read_at_its_stop_token(build_scorer):
    (record,) = build_scorer("token").score([PROMPTS[0]], [""])
    assert len(record.segments) == 1 and record.segments[0].text == "" and record.segments[0].tokens == 1


def test_prompts_and_responses_pair_up(build_scorer):
    with pytest.raises(ValueError, match="2 prompts for 1 responses"):
        build_scorer().score(PROMPTS[:2], ["a"])


def test_normalized_rewards_are_those_of_the_formula(build_scorer):
    scorer = build_scorer("token")
    scorer.normalizer = LocationNormalizer.from_parameters(0.3, 0.1, 0.2, 1.5, fingerprint=scorer.fingerprint)
    (record,) = scorer.score([PROMPTS[0]], ["abcd"])
    for s in record.segments:
        log = torch.tensor(s.location).log().item()
        assert s.normalized == pytest.approx((s.reward - 0.3 * log - 0.2) / (0.1 * log + 1.5), abs=1e-5)


def test_a_normalizer_of_another_rule_is_refused(build_scorer):
    scorer = build_scorer("token")
    scorer.normalizer = LocationNormalizer.from_parameters(0, 0, 0, 1, fingerprint="other", rule="entropy>2")
    with pytest.raises(
        ValueError, match=r"calibrated for segmentation entropy>2 .* read under token.*segrew calibrate"
    ):
        scorer.score([PROMPTS[0]], ["abcd"])


def test_describing_sampled_ids_uses_their_own_text(build_scorer):
    scorer = build_scorer("token")
    ids = scorer.chat.response_ids("a🙂é")
    rows = Conversations([[5]], [ids], torch.tensor([True]))
    cut = segment(scorer.segmentation, rows.mask, ended=rows.ended)
    (record,) = scorer.describe(cut, scorer.segment_and_read(rows)[1], rows)
    assert "".join(s.text for s in record.segments) == "a🙂é" and sum(s.tokens for s in record.segments) == 8


def test_the_card_round_trips_and_covers_the_rule(tmp_path, build_scorer):
    card = build_scorer("entropy", threshold=3.3, aggregator="softmax", temperature=2.0).card
    card.save(tmp_path)
    assert RewardModelCard.load(tmp_path) == card
    assert read_json(tmp_path / CARD_FILE)["fingerprint"] == card.fingerprint
    for change in ({"read_position": "content"}, {"segmenter_fingerprint": "x"}, {"tokenizer_fingerprint": "x"}):
        assert RewardModelCard(**vars(card) | change).fingerprint != card.fingerprint
    for change in ({"aggregator": "sum"}, {"max_length": 9}, {"versions": {}}):
        assert RewardModelCard(**vars(card) | change).fingerprint == card.fingerprint


def test_a_directory_that_is_no_reward_model_is_refused(tmp_path, build_scorer):
    with pytest.raises(ValueError, match="is no reward-model directory"):
        SegmentRewardModel.from_pretrained(tmp_path)
    for content in ({"base_model": "x"}, {"segmentation": {"rule": "token"}, "colour": "red"}):
        write_json(tmp_path / CARD_FILE, content)
        with pytest.raises(ValueError, match="not a card of this version"):
            SegmentRewardModel.from_pretrained(tmp_path)


def test_a_saved_directory_gives_the_same_scores_and_pads_with_no_stop_token(
    tmp_path, build_scorer, build_byte_tokenizer
):
    scorer = build_scorer("token", tokenizer=build_byte_tokenizer(pad="</s>"))
    scorer.normalizer = LocationNormalizer.from_parameters(0.1, 0, 0, 1, fingerprint=scorer.fingerprint)
    before = scorer.score(PROMPTS, TEXTS)
    scorer.save_pretrained(tmp_path)
    loaded = SegmentRewardModel.from_pretrained(tmp_path)
    for one, other in zip(before, loaded.score(PROMPTS, TEXTS), strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-6)
        assert [s.normalized for s in one.segments] == pytest.approx([s.normalized for s in other.segments], abs=1e-5)
    assert read_json(tmp_path / "config.json")["pad_token_id"] == 0 == loaded.chat.tokenizer.pad_token_id
    assert loaded.fingerprint == scorer.fingerprint and (tmp_path / NORMALIZER_FILE).exists()


def test_a_replaced_tokenizer_or_segmenter_is_refused(tmp_path, build_scorer, build_byte_tokenizer):
    scorer = build_scorer("entropy", threshold=3.3)
    scorer.save_pretrained(tmp_path / "rm")
    scorer.segmenter().lm_head.weight.data[3, 3] += 1
    scorer.segmenter().save_pretrained(tmp_path / "sft")
    card = read_json(tmp_path / "rm" / CARD_FILE)
    write_json(tmp_path / "rm" / CARD_FILE, card | {"base_model": str(tmp_path / "sft")})
    loaded = SegmentRewardModel.from_pretrained(tmp_path / "rm")
    with pytest.raises(ValueError, match="has other weights than when this reward model was trained"):
        loaded.segmenter()
    build_byte_tokenizer(merges=(("b", "c"),)).save_pretrained(tmp_path / "rm")
    with pytest.raises(ValueError, match="its tokenizer or chat template is not the one"):
        SegmentRewardModel.from_pretrained(tmp_path / "rm")


def test_a_card_beyond_the_context_is_read_within_it(tmp_path, head_dir):
    """One that an earlier version wrote: rows are cut to the context, with a warning, and say that they are."""
    path = shutil.copytree(head_dir, tmp_path / "long")
    write_json(path / CARD_FILE, read_json(path / CARD_FILE) | {"max_length": 4096})
    with pytest.warns(UserWarning, match="says max_length 4096, and the reward model's context has 1024 tokens"):
        model = SegmentRewardModel.from_pretrained(path)
    (scored,) = model.score(["Say on."], ["on and " * 2000])
    assert scored.cut and len(model.encode("Say on.", "on and " * 2000).response) <= 1024
