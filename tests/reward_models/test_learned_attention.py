"""The aggregator `learned`: a second head that weighs units, trained and saved with the first."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from reward_models import SegmentRewardModel

PROMPT, TEXT = [{"role": "user", "content": "Why is the sky blue?"}], "Air scatters blue light the most, I read."
STILL = {"tune": "full", "learning_rate": 0, "max_steps": 1, "dataset_test_split": "null"}
KINDS = {"full": {"tune": "full"}, "merged": {"tune": "lora"}, "adapter": {"tune": "lora", "lora_merge": False}}


@pytest.fixture(scope="module")
def models(tmp_path_factory, train):
    """One of each kind, trained for two steps, with its directory."""
    root = tmp_path_factory.mktemp("learned")
    flags = {"aggregator": "learned", "learning_rate": 1e-2, "max_steps": 2, "dataset_test_split": "null"}
    return {kind: (train(root / kind, **flags | more), root / kind) for kind, more in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_the_attention_weighted_sum(models, kind):
    """The weights come from the saved file, the states from a whole forward pass."""
    trained, path = models[kind]
    loaded = SegmentRewardModel.from_pretrained(path)
    (record,) = loaded.score([PROMPT], [TEXT])
    assert record.score == pytest.approx(trained.score([PROMPT], [TEXT])[0].score, abs=1e-5)

    weights = load_file(path / ("adapter_model.safetensors" if kind == "adapter" else "model.safetensors"))
    (attention,) = (weight[0] for name, weight in weights.items() if name.endswith("unit_attention.weight"))
    assert attention.abs().max() > 1e-4  # it was trained
    prompt, response = loaded.chat.prompt_ids(PROMPT), loaded.chat.response_ids(TEXT)
    plain = loaded.model.get_base_model() if kind == "adapter" else loaded.model
    with torch.no_grad():
        states = plain.model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
    ends = torch.tensor([segment.tokens for segment in record.segments]).cumsum(0) - 1 + len(prompt)
    attended = (states[ends] @ attention).exp()
    rewards = torch.tensor([segment.reward for segment in record.segments])
    assert len(rewards) > 2
    assert record.score == pytest.approx(float((attended * rewards).sum() / attended.sum()), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_classes_load_it_and_read_at_the_stop_token(models, kind):
    path = models[kind][1]
    loaded = SegmentRewardModel.from_pretrained(path)
    ids = loaded.chat.prompt_ids(PROMPT) + loaded.chat.response_ids(TEXT)
    stock = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    with torch.no_grad():
        reading = stock(input_ids=torch.tensor([ids])).logits.item()
    assert reading == pytest.approx(loaded.score([PROMPT], [TEXT])[0].segments[-1].reward, abs=1e-5)


def test_it_begins_as_the_mean(tmp_path, train):
    learned, mean = (train(tmp_path / kind, **STILL | {"aggregator": kind}) for kind in ("learned", "mean"))
    scores = [model.score([PROMPT], [TEXT])[0].score for model in (learned, mean)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_training_goes_on_from_its_weights(tmp_path, train, models):
    model, path = models["full"]
    again = train(tmp_path / "on", model_name_or_path=path, **STILL | {"aggregator": "learned"})
    torch.testing.assert_close(again.model.unit_attention.weight, model.model.unit_attention.weight)


def test_another_aggregator_drops_it(tmp_path, train, models):
    train(tmp_path / "mean", model_name_or_path=models["full"][1], **STILL)
    assert "unit_attention.weight" not in load_file(tmp_path / "mean" / "model.safetensors")


def test_a_checkpoint_that_lacks_it_is_refused(tmp_path, models):
    copy = shutil.copytree(models["full"][1], tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["unit_attention.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"needs the weights unit_attention\.weight"):
        SegmentRewardModel.from_pretrained(copy)


def test_a_frozen_trunk_refuses_it(tmp_path, train):
    with pytest.raises(ValueError, match="--aggregator learned with --tune head"):
        train(tmp_path / "a", aggregator="learned", tune="head")
