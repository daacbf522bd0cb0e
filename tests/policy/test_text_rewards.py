"""A reward model that reads text: equal to the direct path for equal tokens, right for others (field report B13 d)."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from policy.ppo_config import PPOConfig
from policy.readings import Answered, Units
from policy.reward_sources import ModelReward
from policy.roles import load_roles
from policy.scoring import Axes, cut_units
from policy.text_rewards import TextModelReward
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.segment_reward_model import RewardModelCard
from segrew.chat import ChatFormat
from segrew.chat_templates import NAMED_TEMPLATES
from segrew.conversations import Conversations
from segrew.prompts import Prompt
from segrew.segmentation import SegmentationConfig, segment_by_response

CPU = torch.device("cpu")
TEXTS = ["Hello there, you.", "red", "The Rhine, I think: ü", ""]
ENDED = [True, False, True, True]


@pytest.fixture(scope="module")
def parts(policy_dir, reward_dirs):
    config = PPOConfig(model_name_or_path=str(policy_dir), reward_model_path=str(reward_dirs["entropy"]))
    roles = load_roles(config, CPU)
    prompts = [Prompt([{"role": "user", "content": f"Question {i}?"}]) for i in range(len(TEXTS))]
    responses = [roles.chat.response_ids(text)[: None if end else -1] for text, end in zip(TEXTS, ENDED, strict=True)]
    conversations = Conversations(
        [roles.chat.prompt_ids(prompt.messages) for prompt in prompts], responses, torch.tensor(ENDED)
    )
    return config, roles, Answered(prompts, conversations, TEXTS)


@pytest.mark.parametrize("terminal", [False, True])
def test_reading_text_equals_reading_ids_where_tokens_are_equal(parts, terminal):
    config, roles, answered = parts
    axes = Axes.from_config(config, roles.reward_model)
    units = cut_units(answered.conversations, roles, axes, config, torch.Generator())
    model = roles.reward_model
    direct = ModelReward("rm", model, terminal, axes.normalizer, 3).read(answered, units)
    by_text = TextModelReward("rm", model, roles.chat, terminal, axes.normalizer, 3).read(answered, units)
    assert units.readings.counts.max() > 2
    assert torch.equal(direct.segmentation.ids, by_text.segmentation.ids)
    width = by_text.rewards.shape[1]
    assert not direct.rewards[:, width:].any()
    for name in ("raw", "rewards"):
        torch.testing.assert_close(getattr(direct, name)[:, :width], getattr(by_text, name), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(direct.scores, by_text.scores, atol=1e-5, rtol=1e-5)
    assert direct.how == by_text.how


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a few longer pieces; no token ends where "lo t" is split by segments of two bytes."""
    symbols = ["<pad>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("r", "e"), ("re", "d")]
    symbols += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = NAMED_TEMPLATES["raw"]
    return fast


@pytest.fixture(scope="module")
def foreign(build_tiny_config):
    """A reward model over longer tokens than the policy's bytes, one unit for every two of its tokens."""
    torch.manual_seed(5)
    chat = ChatFormat.from_tokenizer(word_tokenizer())
    card = RewardModelCard(SegmentationConfig(rule="ngram", n=2), "", "", chat.fingerprint)
    model = LlamaForSequenceClassification(build_tiny_config(num_labels=1, vocab_size=270)).eval()
    return SegmentRewardModel(model, chat, card)


def test_b13_segments_of_other_tokens_land_on_the_characters_they_cover(parts, foreign):
    """Its tokens are "Hell" "o" | " the" "r" | "e" "," | …; ours are bytes."""
    config, roles, answered = parts
    axes = Axes.from_config(config, roles.reward_model)
    units = cut_units(answered.conversations, roles, axes, config, torch.Generator())
    normalizer = LocationNormalizer.from_parameters(0.3, 0.1, 0.2, 2.0)
    found = TextModelReward("rm", foreign, roles.chat, False, normalizer, 2).read(answered, units)

    prompts = [prompt.messages for prompt in answered.prompts]
    scored = foreign.score(prompts, TEXTS)  # as if every answer had ended
    for row, text in enumerate(TEXTS):
        if not ENDED[row]:
            continue
        segments = scored[row].segments
        assert found.scores[row].item() == pytest.approx(scored[row].score, abs=1e-5)
        assert found.raw[row].sum().item() == pytest.approx(sum(s.reward for s in segments), abs=1e-4)
        # Every byte token belongs to the segment that its last character, begun or ended, is in.
        count = len(answered.conversations.responses[row])
        ends = [len(text.encode()[: j + 1].decode(errors="replace")) for j in range(count)]
        expected = [next((k for k, s in enumerate(segments) if end <= s.end), len(segments) - 1) for end in ends]
        assert found.segmentation.ids[row, :count].tolist() == expected
    assert found.segmentation.ids[0, :6].tolist() == [0, 0, 0, 0, 0, 1]
    assert torch.equal(found.segmentation.mask, answered.conversations.mask)


@pytest.mark.parametrize("terminal", [False, True])
def test_an_answer_beyond_the_model_s_context_gets_no_reward_and_the_others_theirs(
    parts, foreign, monkeypatch, terminal
):
    config, roles, answered = parts
    units = cut_units(
        answered.conversations, roles, Axes.from_config(config, roles.reward_model), config, torch.Generator()
    )
    reader = TextModelReward("rm", foreign, roles.chat, terminal, None, 1000)
    whole = reader.read(answered, units)
    theirs = reader._encode(answered)
    needed = [len(prompt) + len(response) for prompt, response in zip(theirs.prompts, theirs.responses, strict=True)]
    longest = needed.index(max(needed))
    monkeypatch.setattr(foreign.model.config, "max_position_embeddings", max(needed) - 1)
    with pytest.warns(UserWarning, match=rf"1 of 4 answers.*context of rm \(up to {max(needed)} of its tokens"):
        found = reader.read(answered, units)
    assert found.bad.tolist() == [row == longest for row in range(4)]
    for row in set(range(4)) - {longest}:
        assert found.scores[row].item() == pytest.approx(whole.scores[row].item(), abs=1e-5)
        assert found.rewards[row].sum().item() == pytest.approx(whole.rewards[row].sum().item(), abs=1e-5)
    assert torch.equal(found.segmentation.mask, answered.conversations.mask)
    monkeypatch.setattr(foreign.model.config, "max_position_embeddings", 1)
    with pytest.warns(UserWarning, match="4 of 4 answers"):
        assert reader.read(answered, units).bad.all()


def test_segments_without_a_token_lend_their_reward_to_the_next(foreign, parts):
    """The other way round: the policy writes long tokens, the reward model has a segment for each byte."""
    _, roles, _ = parts
    long_chat = foreign.chat
    bytes_model = roles.reward_model
    card = RewardModelCard(SegmentationConfig(rule="token"), "", "", bytes_model.chat.fingerprint)
    model = SegmentRewardModel(bytes_model.model, bytes_model.chat, card)
    text = "Hello"
    ids = long_chat.response_ids(text)  # "Hell", "o", stop
    assert len(ids) == 3
    prompt = Prompt([{"role": "user", "content": "Say it."}])
    answered = Answered([prompt], Conversations([[5]], [ids], torch.tensor([True])), [text])
    whole = segment_by_response(torch.ones(1, 3, dtype=torch.bool))
    units = Units(torch.zeros(1, 3), {}, whole, whole)
    found = TextModelReward("rm", model, long_chat, False, None, 2).read(answered, units)
    rewards = [s.reward for s in model.score([prompt.messages], [text])[0].segments]
    assert len(rewards) == 5  # H e l l o with the stop token
    assert found.segmentation.ids.tolist() == [[0, 1, 1]]
    assert found.raw[0].tolist() == pytest.approx([sum(rewards[:4]), rewards[4]], abs=1e-5)
