"""Callables as rewards: what they are given, what they may return, and what is refused (field reports B23, B29)."""

import fractions
import math
from pathlib import Path

import pytest
import torch

from policy.ppo import train_policy
from policy.readings import Answered, Units
from policy.reward_functions import FunctionReward, load_function
from segrew.chat import ChatFormat
from segrew.conversations import Conversations
from segrew.language_models import load_tokenizer
from segrew.prompts import Prompt
from segrew.segmentation import Segmentation, segment_by_response


@pytest.fixture(scope="module")
def chat(policy_dir):
    return ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))


@pytest.fixture(scope="module")
def answered(chat):
    """Two answers of 5 and 3 tokens, the second cut off; columns differ between rows."""
    prompts = [
        Prompt([{"role": "user", "content": "Say hi."}], {"id": 7, "level": "easy"}),
        Prompt([{"role": "user", "content": "Go."}], {"id": 8}),
    ]
    ids = [[*chat.response_ids("hi ya")[:4], chat.stop_id], chat.response_ids("abc")[:3]]
    return Answered(prompts, Conversations([[1], [1]], ids, torch.tensor([True, False])), ["hi y", "abc"])


@pytest.fixture(scope="module")
def units():
    readings = Segmentation(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, -1, -1]]))
    return Units(torch.zeros(2, 5), {}, readings, segment_by_response(readings.mask))


def source(function, chat):
    return FunctionReward("my_rewards:f", function, chat)


def test_a_function_gets_prompts_texts_and_the_columns_it_names(chat, answered, units):
    seen = {}

    def f(prompts, completions, level, segments):
        seen.update(prompts=prompts, completions=completions, level=level, segments=segments)
        return [0.0, 0.0]

    source(f, chat).read(answered, units)
    assert seen == {
        "prompts": [prompt.messages for prompt in answered.prompts],
        "completions": ["hi y", "abc"],
        "level": ["easy", None],
        "segments": [["hi ", "y"], ["a", "bc"]],
    }

    def g(prompts, completions, **columns):
        seen.clear()
        seen.update(columns)
        return torch.zeros(2)

    source(g, chat).read(answered, units)
    assert set(seen) == {"id", "level", "segments", "completion_ids"}
    assert seen["id"] == [7, 8] and seen["completion_ids"] == answered.conversations.responses


@pytest.mark.parametrize(
    "entries, units_of, rewards, how, scores",
    [
        ([2, -1.5], "response", [[2.0], [-1.5]], "last", [2.0, -1.5]),
        ([torch.tensor(2), torch.tensor(-1.5)], "response", [[2.0], [-1.5]], "last", [2.0, -1.5]),
        ([[1.0, 2.0], [3.0, -4.0]], "segments", [[1.0, 2.0], [3.0, -4.0]], None, [3.0, -1.0]),
        (
            [[1, 2, 3, 4, 5], torch.tensor([0.5, 0.0, 0.5])],
            "tokens",
            [[1.0, 2.0, 3.0, 4.0, 5.0], [0.5, 0.0, 0.5, 0.0, 0.0]],
            "last",
            [15.0, 1.0],
        ),
    ],
)
def test_a_number_an_answer_or_one_a_segment_or_one_a_token(
    chat, answered, units, entries, units_of, rewards, how, scores
):
    reading = source(lambda prompts, completions: entries, chat).read(answered, units)
    counts = {"response": [1, 1], "segments": [2, 2], "tokens": [5, 3]}[units_of]
    assert reading.segmentation.counts.tolist() == counts
    assert reading.rewards.tolist() == rewards and reading.how == how
    assert reading.scores.tolist() == scores
    assert not reading.bad.any()


def test_b29_other_lengths_are_refused(chat, answered, units):
    """Nothing is padded or cut to fit, and a list of one value is not a number for the whole answer."""
    message = r"my_rewards:f returned {} values for answer {}, which has 2 segments and {} tokens"
    for entries, given, row, tokens in (
        ([[1.0, 2.0], [1.0, 2.0, 3.0]], 3, 1, 3),
        ([[1.0] * 5, [1.0] * 2], 5, 0, 5),
        ([[1.0], [1.0]], 1, 0, 5),
    ):
        with pytest.raises(ValueError, match=message.format(given, row, tokens)):
            source(lambda prompts, completions, found=entries: found, chat).read(answered, units)
    for odd, shown in ([1.0, [1.0, 2.0]], r"1\.0"), (["good", "bad"], "'good'"), ([object(), None], "<object"):
        with pytest.raises(ValueError, match=f"my_rewards:f returned {shown}.* among its entries; return a number"):
            source(lambda prompts, completions, found=odd: found, chat).read(answered, units)
    with pytest.raises(ValueError, match="returned 1 entries for 2 answers"):
        source(lambda prompts, completions: [1.0], chat).read(answered, units)


def test_b23_none_is_a_missing_reward_and_not_zero(chat, answered, units):
    for entries in ([1.0, None], [1.0, math.nan], [[1.0, 2.0], None], [[1.0, 2.0], [math.inf, 0.0]]):
        reading = source(lambda prompts, completions, found=entries: found, chat).read(answered, units)
        assert reading.bad.tolist() == [False, True]


def test_functions_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("LIMIT = 3\n\ndef brief(prompts, completions):\n    return [0]\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("rewards_of_mine:brief")([], []) == [0]
    for name, reason in (
        ("rewards_of_mine", "expected module:function"),
        ("rewards_of_mine:missing", "missing"),
        ("no_such_module_here:f", "no_such_module_here"),
        ("rewards_of_mine:LIMIT", "is a int, not a function"),
    ):
        with pytest.raises(ValueError, match=f"--reward_functions {name}: .*{reason}"):
            load_function(name)


def test_a_column_may_not_hide_what_the_run_passes(chat, answered, units):
    prompts = [Prompt(prompt.messages, {"segments": 1}) for prompt in answered.prompts]
    with pytest.raises(ValueError, match="a column 'segments'"):
        source(lambda prompts, completions: [0, 0], chat).read(
            Answered(prompts, answered.conversations, answered.texts), units
        )


def test_a_function_that_fails_or_returns_nothing_is_named(chat, answered, units):
    def broken(prompts, completions):
        raise KeyError("score")

    for function, reason in ((broken, "raised KeyError: 'score'"), (lambda prompts, completions: None, "NoneType")):
        with pytest.raises(ValueError, match=reason):
            source(function, chat).read(answered, units)


def test_a_column_that_the_data_lack_is_refused_with_those_there_are(chat, answered):
    def f(prompts, completions, answer_key, segments, level="easy", **columns):
        return [0.0, 0.0]

    with pytest.raises(ValueError, match=r"my_rewards:f needs the column 'answer_key', .*there are: id, level"):
        source(f, chat).require_columns(answered.prompts)
    with pytest.raises(ValueError, match="none besides the prompt"):
        source(f, chat).require_columns([Prompt([])])
    source(f, chat).require_columns([Prompt([], {"answer_key": 1})])
    source(lambda prompts, completions, *, level: [], chat).require_columns(answered.prompts)


def test_a_column_that_a_function_needs_is_missed_before_the_first_rollout(settings, monkeypatch):
    def f(prompts, completions, answer_key):
        return [0.0] * len(completions)

    monkeypatch.setattr(fractions, "f", f, raising=False)  # of any module
    config = settings(reward_model_path="", reward_functions=["fractions:f"])
    with pytest.raises(ValueError, match=r"fractions:f needs the column 'answer_key', .*none besides the prompt"):
        train_policy(config)
    assert not Path(config.output_dir).exists()
