"""Where answers end (field report B28), and that the model's own generation settings play no part (B26)."""

import pytest
import torch

from policy.rollout import Sampling, in_micro_batches, left_pad, sample_answers, trim, trim_at_string
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, response_statistics
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.segmentation import join_stop, segment_by_token


@pytest.fixture(scope="module")
def model(policy_dir):
    return load_causal_lm(str(policy_dir), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def chat(policy_dir):
    return ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "ids, stop_ids, kept, ended",
    [
        ([5, 6, 2, 9, 9], {2}, [5, 6, 2], True),
        ([5, 6, 8, 9, 4], {2}, [5, 6, 8, 9, 4], False),
        ([5, 7, 2, 9, 9], {2, 7}, [5, 7], True),
        ([2, 0, 0, 0, 0], {2}, [2], True),
        ([], {2}, [], False),
    ],
)
def test_b28_answers_end_at_their_first_stop_token(ids, stop_ids, kept, ended):
    assert trim(ids, stop_ids) == (kept, ended)


def test_b28_a_stop_token_alone_is_one_unit():
    mask = torch.tensor([[True, False, False, False, False]])
    assert join_stop(segment_by_token(mask), torch.tensor([True])).counts.tolist() == [1]


def test_a_stop_string_stays_in_the_ids_and_leaves_the_text():
    letters = [ord(c) for c in "abc\nUser: d"]

    def decode(ids):
        return "".join(map(chr, ids))

    ids, text, ended = trim_at_string(letters, ("\nUser:", "zzz"), decode)
    assert (decode(ids), text, ended) == ("abc\nUser:", "abc", True)
    assert trim_at_string(letters, ("zzz",), decode) == (letters, "abc\nUser: d", False)
    assert trim_at_string(letters, (), decode) == (letters, "abc\nUser: d", False)


def test_left_padding_mask_comes_from_lengths():
    ids, mask = left_pad([[7], [0, 0, 5]], pad_id=0, device=torch.device("cpu"))
    assert ids.tolist() == [[0, 0, 7], [0, 0, 5]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="--temperature"):
        Sampling(temperature=temperature)


def test_greedy_is_asked_for_apart_and_draws_nothing(model, chat):
    assert Sampling().at(0.0) == Sampling(greedy=True) and Sampling().at(0.7) == Sampling(temperature=0.7)
    assert not Sampling(greedy=True).at(0.7).greedy
    with pytest.raises(ValueError, match="--temperature -1"):
        Sampling().at(-1.0)
    prompts = [chat.prompt_ids([{"role": "user", "content": "go"}])] * 6
    rows = [
        sample_answers(model, chat, prompts, Sampling(max_new_tokens=6).at(0.0), generator(seed)) for seed in (0, 1)
    ]
    assert len({tuple(row) for answers in rows for row in answers.conversations.responses}) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_models_own_generation_settings_are_hidden_and_restored(model, chat, temperature):
    """B26 d: the fixture's config asks for top_k 3, a repetition penalty and at least 4 tokens."""
    assert (model.generation_config.top_k, model.generation_config.min_new_tokens) == (3, 4)
    before = model.generation_config.to_dict()
    prompt = chat.prompt_ids([{"role": "user", "content": "Say hi."}])
    sampling = Sampling(max_new_tokens=4, batch_size=500, temperature=temperature)
    answers = sample_answers(model, chat, [prompt] * 500, sampling, generator())
    firsts = torch.tensor([row[0] for row in answers.conversations.responses])
    assert len(firsts.unique()) > 20
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(firsts, minlength=259)
    top = expected.topk(3).indices
    spread = (500 * expected[top] * (1 - expected[top])).sqrt()
    assert ((counts[top] - 500 * expected[top]).abs() < 4.5 * spread).all()
    assert any(len(row) < 4 for row in answers.conversations.responses)
    assert model.generation_config.to_dict() == before


def test_no_stop_token_is_invented(model, chat):
    prompts = [chat.prompt_ids([{"role": "user", "content": "x" * k}]) for k in (1, 9, 4, 30)] * 8
    answers = sample_answers(model, chat, prompts, Sampling(max_new_tokens=12, batch_size=5), generator(1))
    ended = answers.conversations.ended.tolist()
    assert set(ended) == {True, False}
    for ids, stopped, text in zip(answers.conversations.responses, ended, answers.texts, strict=True):
        assert (ids[-1] == chat.stop_id) == stopped
        assert chat.stop_id not in ids[:-1]
        assert len(ids) == 12 or stopped
        assert text == chat.decode(ids) and "<|im_end|>" not in text


def test_rows_keep_their_prompts_and_one_generator_decides(model, chat):
    prompts = [chat.prompt_ids([{"role": "user", "content": "x" * k}]) for k in (30, 1, 9)]
    state = torch.get_rng_state()
    first = sample_answers(model, chat, prompts, Sampling(max_new_tokens=6), generator(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    again = sample_answers(model, chat, prompts, Sampling(max_new_tokens=6), generator(2))
    other = sample_answers(model, chat, prompts, Sampling(max_new_tokens=6), generator(3))
    assert first.conversations.prompts == prompts
    assert first.conversations.responses == again.conversations.responses != other.conversations.responses


def test_a_stop_string_ends_a_sampled_answer(model, chat):
    prompts = [chat.prompt_ids([{"role": "user", "content": "go"}])] * 40
    plain = sample_answers(model, chat, prompts, Sampling(max_new_tokens=10), generator(4))
    stop = next(text[2] for text in plain.texts if len(text) > 4 and text[2] not in text[:2] and text[2].isascii())
    sampling = Sampling(max_new_tokens=10, stop_strings=(stop,))
    answers = sample_answers(model, chat, prompts, sampling, generator(4))
    hits = 0
    for ids, text, ended in zip(
        answers.conversations.responses, answers.texts, answers.conversations.ended.tolist(), strict=True
    ):
        assert stop not in text
        if stop in chat.decode(ids):
            hits += 1
            assert ended and chat.decode(ids).endswith(stop) and stop not in chat.decode(ids[:-1])
    assert hits


def test_extra_stop_tokens_end_an_answer(model, chat):
    prompts = [chat.prompt_ids([{"role": "user", "content": "go"}])] * 40
    plain = sample_answers(model, chat, prompts, Sampling(max_new_tokens=8), generator(5))
    extra = plain.conversations.responses[0][1]
    sampling = Sampling(max_new_tokens=8, stop_token_ids=(extra,))
    answers = sample_answers(model, chat, prompts, sampling, generator(5))
    assert sampling.effective(chat)["stop_ids"] == [chat.stop_id, extra]
    assert all(extra not in ids[:-1] for ids in answers.conversations.responses)
    assert any(ids[-1] == extra for ids in answers.conversations.responses)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(model, chat, temperature):
    """Against log-softmax of logits / T, one unpadded row at a time."""
    prompts = [chat.prompt_ids([{"role": "user", "content": "x" * k}]) for k in (3, 17, 8)]
    sampling = Sampling(max_new_tokens=9, temperature=temperature)
    conversations = sample_answers(model, chat, prompts, sampling, generator(6)).conversations
    with torch.no_grad():
        logprobs, entropy = in_micro_batches(
            lambda part: response_statistics(model, part, temperature=temperature), conversations, 2
        )
        for i, (prompt, response) in enumerate(zip(prompts, conversations.responses, strict=True)):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
            rows = range(len(response))
            expected = (logits / temperature).log_softmax(-1)[rows, response]
            torch.testing.assert_close(logprobs[i, : len(response)].double(), expected, atol=1e-5, rtol=0)
            p = logits.log_softmax(-1)
            torch.testing.assert_close(entropy[i, : len(response)].double(), -(p.exp() * p).sum(-1), atol=1e-5, rtol=0)
            assert not logprobs[i, len(response) :].any()


def test_micro_batches_put_rows_back_in_place():
    lengths = [3, 1, 4, 2]
    conversations = Conversations([[9]] * 4, [[i] * n for i, n in enumerate(lengths)], torch.tensor([True] * 4))
    seen = []

    def compute(part):
        seen.append(len(part))
        return (part.response_ids.float() + 1,)

    (whole,) = in_micro_batches(compute, conversations, 8)
    assert seen == [2, 2]  # 1 + 4 + 3 tokens fill the first
    for i, n in enumerate(lengths):
        assert (whole[i, :n] == i + 1).all()
