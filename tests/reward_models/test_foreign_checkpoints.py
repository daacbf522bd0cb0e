"""Checkpoints of other programs: their names for the head, their statistics, and the released code's convention."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.checkpoints import load_classifier
from reward_models.foreign_checkpoints import head_renaming, weight_names
from segrew.chat import ChatFormat
from segrew.language_models import load_tokenizer
from segrew.run_directory import read_json, write_json
from segrew.segmentation import SegmentationConfig

PROMPT, TEXT = [{"role": "user", "content": "abc? "}], "defgh, ij."
WHOLE = "ignore:.*is read as an ordinary .bandit. reward model:UserWarning"


@pytest.fixture
def stock(tmp_path, build_scorer_config, build_byte_tokenizer):
    """A checkpoint as TRL leaves it: head `score`, tokenizer with its template, and nothing of segrew's."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(build_scorer_config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "stock")
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def segmenter(tmp_path, build_scorer_config, stock):
    """An SFT model whose entropies differ, with the same tokenizer."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(build_scorer_config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
        model.lm_head.weight.mul_(3)
    model.save_pretrained(tmp_path / "sft")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(stock / name, tmp_path / "sft")
    return tmp_path / "sft"


def readings(path, model: SegmentRewardModel) -> list[float]:
    """The head at every response token, stop token included, by a whole pass of the stock class."""
    plain = LlamaForSequenceClassification.from_pretrained(path)
    prompt, response = model.chat.prompt_ids(PROMPT), model.chat.response_ids(TEXT)
    with torch.no_grad():
        states = plain.model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
        return (states[len(prompt) :] @ plain.score.weight[0]).tolist()


def test_a_stock_reward_model_is_read_once_at_the_stop_token_with_a_warning(stock):
    with pytest.warns(UserWarning, match=r"has no segrew\.json.*bandit.*not trained or calibrated on parts"):
        model = SegmentRewardModel.from_pretrained(stock)
    (record,) = model.score([PROMPT], [TEXT])
    assert record.score == pytest.approx(readings(stock, model)[-1], abs=1e-5) and len(record.segments) == 1
    assert model.segmentation.rule == "response" and model.normalizer is None
    with pytest.raises(ValueError, match="names no model that cuts responses"):
        model.segmenter()


LAYOUTS = {
    "value_head": lambda name: name.replace("score", "value_head"),
    "wrapped": lambda name: "module." + name.replace("score", "value_head"),
    "wrapped score": lambda name: "model." + name,
    "bare trunk": lambda name: name.replace("score", "value_head").removeprefix("model."),
    "head below the trunk": lambda name: name.replace("score", "model.value_head"),
}


@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b32_another_name_of_the_head_is_the_head(tmp_path, stock, layout):
    copy = shutil.copytree(stock, tmp_path / "other")
    weights = {LAYOUTS[layout](name): weight for name, weight in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    write_json(copy / "config.json", read_json(copy / "config.json") | {"architectures": ["RewardModel"]})
    one, other = (SegmentRewardModel.from_pretrained(path).score([PROMPT], [TEXT]) for path in (stock, copy))
    assert one[0].score == pytest.approx(other[0].score, abs=1e-6)
    for new_head in (True, False):  # nor does training on from it begin with another head
        head = load_classifier(copy, new_head=new_head).score.weight
        assert torch.equal(head, load_file(stock / "model.safetensors")["score.weight"])


def test_names_of_weights_are_read_from_every_kind_of_file(tmp_path, stock):
    names = sorted(load_file(stock / "model.safetensors"))
    assert weight_names(stock) == names and head_renaming(stock) is None
    torch.save({"value_head.weight": torch.ones(1, 2)}, tmp_path / "pytorch_model.bin")
    assert weight_names(tmp_path) == ["value_head.weight"] and head_renaming(tmp_path) == {r"^value_head\.": "score."}
    write_json(tmp_path / "pytorch_model.bin.index.json", {"weight_map": {"x.score.weight": "a", "x.model.w": "b"}})
    assert head_renaming(tmp_path) == {r"^x\.score\.": "score.", r"^x\.": ""}
    assert weight_names(tmp_path / "nowhere") == []


@pytest.mark.filterwarnings(WHOLE)
def test_b35_mean_and_std_of_the_config_normalize_the_score(stock):
    write_json(stock / "config.json", read_json(stock / "config.json") | {"mean": -0.5, "std": 2.0})
    model = SegmentRewardModel.from_pretrained(stock)
    (segment,) = model.score([PROMPT], [TEXT])[0].segments
    assert segment.normalized == pytest.approx((segment.reward + 0.5) / 2, abs=1e-6)
    write_json(stock / "config.json", read_json(stock / "config.json") | {"mean": 0.0, "std": 1.0})
    assert SegmentRewardModel.from_pretrained(stock).normalizer is None


@pytest.mark.filterwarnings(WHOLE)
def test_several_labels_are_refused(stock):
    weights = load_file(stock / "model.safetensors")
    save_file(weights | {"score.weight": torch.ones(3, 16)}, stock / "model.safetensors", metadata={"format": "pt"})
    write_json(stock / "config.json", read_json(stock / "config.json") | {"id2label": {"0": "a", "1": "b", "2": "c"}})
    with pytest.raises(ValueError, match="is no reward model of one score"):
        SegmentRewardModel.from_pretrained(stock)


def test_a_released_model_is_read_by_its_own_convention(tmp_path, stock, segmenter):
    """Units end where the entropy after a token exceeds the threshold; the stop token is in none; e is the mean."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(stock)))
    prompt, response = chat.prompt_ids(PROMPT), chat.response_ids(TEXT)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(segmenter)(input_ids=torch.tensor([prompt + response])).logits[0]
    after = torch.distributions.Categorical(logits=logits[len(prompt) :]).entropy()
    content, middle = len(response) - 1, len(response) // 2
    threshold = float(after.sort().values[middle : middle + 2].mean())
    ends = [j for j in range(content - 1) if after[j] > threshold] + [content - 1]
    assert 2 < len(ends) < content

    rule = SegmentationConfig(threshold=threshold, compat="dense_rlhf_release")
    model = SegmentRewardModel.from_pretrained(stock, segmentation=rule, base_model=str(segmenter))
    model.normalizer = LocationNormalizer.from_parameters(0.7668, 0.2569, 0.4705, 2.8339, fingerprint=model.fingerprint)
    (record,) = model.score([PROMPT], [TEXT])
    expected = [readings(stock, model)[end] for end in ends]
    assert [s.reward for s in record.segments] == pytest.approx(expected, abs=1e-4)
    assert record.score == pytest.approx(sum(expected) / len(ends), abs=1e-4)
    assert "".join(s.text for s in record.segments) == TEXT
    assert sum(s.tokens for s in record.segments) == content
    assert record.segments[-1].normalized == pytest.approx((expected[-1] - 0.4705) / 2.8339, abs=1e-5)
    assert model.card.max_length == 512

    model.save_pretrained(tmp_path / "ours")  # from now on it is a directory for every command
    again = SegmentRewardModel.from_pretrained(tmp_path / "ours")
    assert again.score([PROMPT], [TEXT])[0].score == pytest.approx(record.score, abs=1e-6)
    assert again.segmentation.compat == "dense_rlhf_release"
    with pytest.raises(ValueError, match=r"has a segrew\.json, which says how it is read"):
        SegmentRewardModel.from_pretrained(tmp_path / "ours", segmentation=rule)


def test_what_is_missing_for_another_rule_is_asked_for(stock, segmenter):
    rule = SegmentationConfig(threshold=2.0)
    with pytest.raises(ValueError, match=r"name that model with base_model=…"):
        SegmentRewardModel.from_pretrained(stock, segmentation=rule)
    with pytest.raises(ValueError, match=r"has no threshold in nats; pass SegmentationConfig\(threshold=…\)"):
        SegmentRewardModel.from_pretrained(stock, segmentation=SegmentationConfig(), base_model=str(segmenter))
    assert SegmentRewardModel.from_pretrained(stock, segmentation=SegmentationConfig(rule="token")).score(
        [PROMPT], [TEXT]
    )
