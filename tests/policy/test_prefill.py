"""Prompts that are read flat before `generate` goes on leave it where reading them itself would have."""

import dataclasses

import pytest
import torch

from policy import rollout
from policy.prefill import prefill
from policy.rollout import _generate, left_pad, trim, trim_at_string
from policy.sampling import Sampling
from segrew.chat import ChatFormat
from segrew.language_models import load_tokenizer, trunk_of

SHORT = [[5, 6, 7], [9], [5, 6, 8], [5, 6, 7], [8, 3]]
LONG = [[5, 6, 7, 9, 11, 12, 13, 14, 15], [9], [20, 21, 22, 23, 24], [20, 21, 22, 23, 25]]
SLIDING = (
    "phimoe, a short window",
    "qwen3, a sliding layer",
    "mistral, a short window",
    "phi3, a short window",
    "gemma2",
    "gemma3, a short window",
)
WHOLE = ("llama", "qwen3", "mistral", "phi3", "gemma3", "gpt2")


@pytest.fixture
def chat(policy_dir):
    return ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))


def drawn(model, chat, prompts, monkeypatch, *, reads: bool):
    """Greedy answers, and how many tokens the model was shown for them."""
    seen = []
    hook = trunk_of(model).register_forward_pre_hook(
        lambda module, given, named: seen.append((*given, named.get("input_ids"))[0].numel()), with_kwargs=True
    )
    with monkeypatch.context() as patch, torch.no_grad():
        if not reads:
            patch.setattr(rollout, "prefill", lambda *_: {})
        found = _generate(model, chat, prompts, Sampling(max_new_tokens=9, greedy=True))
    hook.remove()
    return found, sum(seen)


@pytest.mark.parametrize("prompts", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", [*WHOLE, *SLIDING, "gpt_oss"])
def test_the_answers_stay_and_no_prompt_token_is_read_twice(build_family, chat, monkeypatch, name, prompts):
    model = build_family(name)
    with torch.no_grad():
        prefill(model, prompts)  # what cannot be packed shows when it is first tried
    plain, all_tokens = drawn(model, chat, prompts, monkeypatch, reads=False)
    ours, tokens = drawn(model, chat, prompts, monkeypatch, reads=True)
    assert ours == plain
    saved = len(prompts) * (max(map(len, prompts)) - 1) - sum(map(len, {tuple(prompt[:-1]) for prompt in prompts}))
    assert all_tokens - tokens == (saved if name in WHOLE or (name in SLIDING and prompts is SHORT) else 0)


@pytest.mark.parametrize("name", [*WHOLE, "mistral, a short window", "gemma2"])
def test_the_next_logits_are_those_of_a_pass_over_each_prompt(build_family, name):
    model = build_family(name)
    ids, mask = left_pad(SHORT, 0, torch.device("cpu"))
    with torch.no_grad():
        found = model(
            ids[:, -1:], attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, **prefill(model, SHORT)
        ).logits[:, -1]
        for row, prompt in zip(found, SHORT, strict=True):
            torch.testing.assert_close(row, model(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_prompts_of_one_token_leave_nothing_to_read(build_family):
    assert prefill(build_family("llama"), [[3], [4]]) == {}


@pytest.mark.parametrize("name", [*WHOLE, "gemma2", "mistral, a short window"])
@pytest.mark.parametrize("strings", [(), ("!",)], ids=["stop token", "stop string"])
def test_finished_answers_leave_and_the_others_go_on(build_family, chat, monkeypatch, name, strings):

    def ending(answer):
        ids, ended = trim(answer, sampling.stop_ids(chat))
        ids, _, spelled = trim_at_string(ids, strings, chat.decode)
        return ids, ended or spelled

    model = build_family(name)
    rows, sampling = [], Sampling(max_new_tokens=24, greedy=True, stop_strings=strings)
    hook = model.register_forward_pre_hook(lambda *given: rows.append(len(given[2]["input_ids"])), with_kwargs=True)
    with torch.no_grad():
        monkeypatch.setattr(rollout, "LEAVE_EVERY", 24)
        whole = _generate(model, chat, SHORT, sampling)
        assert set(rows) == {len(SHORT)}
        # Answers that end at their first, third … token: as what they happen to say is a stop.
        stops = tuple(answer[2 * k] for k, answer in enumerate(whole[:2]))
        sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        expected = list(map(ending, whole))
        monkeypatch.setattr(rollout, "LEAVE_EVERY", 5)
        rows.clear()
        found = _generate(model, chat, SHORT, sampling)
    hook.remove()
    assert list(map(ending, found)) == expected
    assert any(ended for _, ended in expected)
    assert min(rows) < len(SHORT) or all(ended for _, ended in expected)
