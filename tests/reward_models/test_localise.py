"""Segment rewards against marked spans: what is written of each token, and what comes of hand-made rows."""

import dataclasses

import numpy as np
import pytest
import torch

from reward_models import LocationNormalizer
from reward_models.benchmark_items import Item
from reward_models.benchmark_tables import results_table
from reward_models.localise import (
    METHODS,
    OURS,
    bandit_for,
    localisation_credits,
    localisation_scores,
    localise_items,
)
from reward_models.token_credit import final_attention, prefix_values
from segrew.conversations import Conversations, response_statistics
from segrew.preferences import Fault

USER = [{"role": "user", "content": "why?"}]


@pytest.fixture
def scorer(build_scorer):
    scorer = build_scorer("entropy", threshold=3.3, max_length=64)
    return scorer


def items():
    return [
        Item("1", "", USER, ["a bé cd"], spans=(Fault(2, 4, "rude"),)),
        Item("2", "", USER, ["xyz"], spans=()),
    ]


def test_each_token_carries_its_units_reward_and_the_baselines_credit(scorer):
    rows = localise_items(scorer, scorer, items(), max_tokens=1)
    both = localise_items(scorer, scorer, items(), max_tokens=4096)
    for item, row, other in zip(items(), rows, both, strict=True):
        text = item.answers[0]
        assert row["response"] == text and row["faults"] == [dataclasses.asdict(f) for f in item.spans]
        assert set(row["token_rewards"]) == set(METHODS)
        for name, values in row["token_rewards"].items():
            assert values == pytest.approx(other["token_rewards"][name], abs=1e-4)
            assert len(values) == len(row["token_ends"]) == len(row["token_units"])
        encoded = scorer.encode(USER, text)
        prompt, ids = encoded.prompt, encoded.response
        part = Conversations([prompt], [ids], torch.tensor([encoded.ended]))
        after, before = prefix_values(scorer.model, scorer.head, part)
        attention = after[0, -1] * final_attention(scorer.model, prompt, ids)
        logprobs, _ = response_statistics(scorer.segmenter(), part)
        (scored,) = scorer.score([USER], [text])
        # One token a byte; a cut inside é moves behind it, so its second byte has no text of its own.
        ends = [len(text.encode()[: j + 1].decode(errors="replace")) for j in range(len(ids) - 1)]
        kept = [j for j, end in enumerate(ends) if end > ([0, *ends][j])]
        assert row["token_ends"] == [ends[j] for j in kept]
        units = [k for k, s in enumerate(scored.segments) for _ in range(s.tokens)]
        assert row["token_units"] == [units[j] for j in kept]
        expected = {
            OURS: [scored.segments[units[j]].reward for j in kept],
            "prefix_difference": (after - before)[0, kept].tolist(),
            "attention": attention[kept].tolist(),
            "surprisal": logprobs[0, kept].tolist(),
        }
        for name, values in expected.items():
            assert row["token_rewards"][name] == pytest.approx(values, abs=1e-4), name


def test_normalized_rewards_count_where_there_is_a_normalizer(scorer):
    scorer.normalizer = LocationNormalizer.from_parameters(0.5, 0.1, 0.0, 1.0, fingerprint=scorer.fingerprint)
    (row, _) = localise_items(scorer, scorer, items())
    expected = [row["segments"][unit]["normalized"] for unit in row["token_units"]]
    assert row["token_rewards"][OURS] == pytest.approx(expected)


def test_a_cut_answer_is_measured_up_to_the_cut(scorer):
    long = Item("1", "", USER, ["a" * 200], spans=(Fault(0, 3, "rude"), Fault(150, 190, "rude")))
    (row,) = localise_items(scorer, scorer, [long])
    assert row["cut"] == ["answer"] and row["token_ends"] == list(range(1, len(row["token_ends"]) + 1))
    assert len(row["token_ends"]) < 64


def hand_made(id, rewards, units, faults, text="aa bb cc"):
    """Tokens a, a, " b", b, " c", c."""
    reward = {OURS: rewards, "prefix_difference": rewards[::-1], "attention": [0.0] * 6, "surprisal": rewards}
    return {
        "id": id, "digest": "d", "response": text, "token_ends": [1, 2, 4, 5, 7, 8], "token_units": units,
        "token_rewards": reward, "faults": [{"start": a, "end": b, "kind": kind} for a, b, kind in faults],
    }  # fmt: skip


ROWS = [
    # The words' units score 1, 0, 2 and "bb" is wrong: AUC 1, the lowest unit hits, no word is split.
    hand_made("1", [1.0, 1.0, 0.0, 0.0, 2.0, 2.0], [0, 0, 1, 1, 2, 2], [(3, 5, "rude")]),
    # "aa" is rude, "cc" vague. Units a | abb | cc score 3, 1, 2. Wrong 3 1 2 2, sound 1 1: never below, equal twice.
    hand_made("2", [3.0, 1.0, 1.0, 1.0, 2.0, 2.0], [0, 1, 1, 1, 2, 2], [(0, 2, "rude"), (6, 8, "vague")]),
    # Nothing is wrong here: only the words count.
    hand_made("3", [1.0] * 6, [0] * 6, []),
]


def test_figures_of_hand_made_rows():
    result = localisation_scores(ROWS)
    ours, chance = result["methods"][OURS], result["chance"]
    assert ours["auc"]["value"] == pytest.approx((1 + 1 / 8) / 2) == result["overall"]
    assert ours["auc"]["n"] == 2 and len(ours["auc"]["ci95"]) == 2
    # Row 2's lowest unit, abb, overlaps "aa".
    assert ours["lowest_unit"]["value"] == 1.0
    assert chance["lowest_unit"]["value"] == pytest.approx((1 / 3 + 3 / 3) / 2)
    # One of nine words of two tokens is split.
    assert ours["words_split"]["value"] == pytest.approx((0 + 1 / 3 + 0) / 3)
    # Two cuts on five gaps fall into a given word's gap in 4 of 10 cases; row 3 has no cut.
    assert chance["words_split"]["value"] == pytest.approx((0.4 + 0.4 + 0) / 3)
    step = 2 / 3 / np.std([3, 1, 1, 1, 2, 2])
    assert ours["word_difference"]["value"] == pytest.approx((0 + step + 0) / 3)
    other = result["methods"]["surprisal"]
    assert other["auc"]["ours_minus_this"]["value"] == 0.0 and "ours_minus_this" not in ours["auc"]
    assert result["methods"]["attention"]["auc"]["value"] == 0.5
    assert result["methods"]["attention"]["auc"]["ours_minus_this"]["value"] == pytest.approx(1.125 / 2 - 0.5)


def test_subsets_are_kinds_of_span_against_what_is_in_none():
    result = localisation_scores(ROWS)["subsets"]
    assert list(result) == ["all", "rude", "vague"]
    # rude: row 1 has AUC 1; row 2 has 3, 1 against 1, 1: two draws of four. vague: 2, 2 against 1, 1.
    assert result["rude"]["accuracy"] == pytest.approx((1 + 0.25) / 2) and result["rude"]["n"] == 2
    assert result["vague"]["accuracy"] == 0.0 and result["all"]["ties"] == 0


def test_the_table_says_auc_and_gives_a_single_response_no_interval():
    record = localisation_scores(ROWS) | {"benchmark": "localisation", "settings": {"subset_label": ""}}
    table = results_table(record)
    assert [column.header for column in table.columns][1:4] == ["n", "mean AUC", "95 % interval"]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert record["subsets"]["vague"]["n"] == 1 and rows[2][:4] == ("vague", "1", "0.000", "n/a")
    assert rows[0][3] == "0.125 - 1.000"


def test_credits_are_the_aucs_of_responses_that_have_one():
    assert localisation_credits(ROWS) == {("responses", "1", "d"): 1.0, ("responses", "2", "d"): 0.125}


def test_a_bandit_must_read_whole_responses_and_the_same_tokens(head_dir, train, tmp_path, scorer):
    assert bandit_for(scorer, None) is scorer
    with pytest.raises(ValueError, match=r"--bandit_model .*rule is entropy>.*--rule response"):
        bandit_for(scorer, str(head_dir))
    train(tmp_path / "bandit", tune="head", rule="response")
    with pytest.raises(ValueError, match="reads other tokens"):
        bandit_for(scorer, str(tmp_path / "bandit"))
