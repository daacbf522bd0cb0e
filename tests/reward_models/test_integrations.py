"""Bridges: what TRL's trainers and the `rewardbench` program call, with the shapes they call it with."""

import sys
from types import ModuleType

import pytest
import torch

from reward_models import SegmentRewardModel
from reward_models.integrations import register_rewardbench, reward_function, split_conversation

TURN = {"role": "user", "content": "Why is the sky blue?"}
ANSWERS = ["Air scatters blue light most.", "No."]


@pytest.fixture(scope="module")
def model(head_dir) -> SegmentRewardModel:
    return SegmentRewardModel.from_pretrained(head_dir)


@pytest.fixture(scope="module")
def expected(model) -> list[float]:
    return [record.score for record in model.score([[TURN]] * 2, ANSWERS)]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_conversations_and_plain_text_score_as_the_reward_model_does(model, head_dir, expected):
    reward = reward_function(head_dir)
    columns = {"completion_ids": [[5, 6], [7]], "trainer_state": None, "answer": ["a", "b"]}
    assert reward([[TURN]] * 2, [said(text) for text in ANSWERS], **columns) == pytest.approx(expected, abs=1e-5)
    assert reward_function(model)([TURN["content"]] * 2, ANSWERS) == pytest.approx(expected, abs=1e-5)
    assert reward.__name__ == "segrew" and reward_function(model, name="dense").__name__ == "dense"


def test_earlier_turns_of_a_completion_are_its_prompt(model):
    turns = [*said("Ask away."), TURN, *said(ANSWERS[0])]
    (found,) = reward_function(model)([[TURN]], [turns])
    assert found == pytest.approx(model.score([[TURN, *turns[:2]]], ANSWERS[:1])[0].score, abs=1e-5)
    with pytest.raises(ValueError, match="sample 0: a completion must end with an assistant's message"):
        reward_function(model)([[TURN]], [[TURN]])


def test_a_completion_without_its_stop_token_is_read_without_one(model, expected):
    stop = model.chat.stop_id
    reward = reward_function(model, stop_ids=[stop])
    found = reward([[TURN]] * 2, ANSWERS, completion_ids=[[5, stop], [5, 6]])
    cut = model.score([[TURN]], ANSWERS[1:], finished=[False])[0]
    assert found == pytest.approx([expected[0], cut.score], abs=1e-5) and found[1] != pytest.approx(expected[1])
    assert "".join(s.text for s in cut.segments) == ANSWERS[1]
    assert sum(s.tokens for s in cut.segments) == len(model.chat.response_ids(ANSWERS[1])) - 1


def test_b23_a_reward_that_is_no_number_is_refused_with_its_text(model, monkeypatch):
    head = model.head.weight.clone()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="gave the score nan to"):
        reward_function(model)([[TURN]] * 2, ANSWERS)
    with torch.no_grad():
        model.head.weight.copy_(head)


def test_rewardbench_gets_an_entry_that_scores_rendered_text(monkeypatch, head_dir, model, expected):
    """The table of the package is stood in for; the calls are those of its program."""
    models = ModuleType("rewardbench.models")
    models.REWARD_MODEL_CONFIG = {}
    monkeypatch.setitem(sys.modules, "rewardbench", ModuleType("rewardbench"))
    monkeypatch.setitem(sys.modules, "rewardbench.models", models)
    name = register_rewardbench(head_dir)
    entry = models.REWARD_MODEL_CONFIG[name]
    assert name == str(head_dir) and not entry["quantized"] and not entry["custom_dialogue"]
    loaded = entry["model_builder"](name, device_map="auto", torch_dtype=torch.float32)
    tokenizer = model.chat.tokenizer
    pipe = entry["pipeline_builder"]("text-classification", model=loaded, tokenizer=tokenizer)
    assert pipe.model.config.pad_token_id is not None
    conversations = [[TURN, *said(text)] for text in ANSWERS]
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations]
    for samples in (texts, conversations):
        scores = pipe(samples, batch_size=2, truncation=False, padding=True, max_length=512)
        assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_text_of_another_template_is_refused(model):
    with pytest.raises(ValueError, match="does not show where its answer begins"):
        split_conversation("Human: x\n\nAssistant: y", model.chat)


def test_an_answer_that_quotes_the_template_is_split_at_its_last_turn(model):
    turns = [TURN, *said("First."), TURN, *said("Second.")]
    text = model.chat.tokenizer.apply_chat_template(turns, tokenize=False)
    prompt, answer = split_conversation(text, model.chat)
    assert answer == "Second." and model.chat.prompt_ids(prompt) == model.chat.prompt_ids(turns[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_trl_s_trainers_learn_from_it(tmp_path, tiny_dir, head_dir, algorithm):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    arguments = getattr(trl, f"{algorithm}Config")(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_completion_length=6,
        max_steps=1, use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [TURN]}] * 2)
    trainer = getattr(trl, f"{algorithm}Trainer")(
        model=str(tiny_dir), reward_funcs=[reward_function(head_dir)], args=arguments, train_dataset=data
    )
    trainer.train()
    assert any("rewards/segrew/mean" in row for row in trainer.state.log_history)
