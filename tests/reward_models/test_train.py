"""Training: the right loss and direction, repeatable, resumable, and with the library's own switches at work."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reward_models.pair_trainer import collate, pair_metrics
from reward_models.pairs import segment_pairs
from reward_models.segment_reward_model import SegmentRewardModel
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments, unread_flags
from segrew.chat import ChatFormat
from segrew.config import parse
from segrew.preferences import PreferencePair, load_preferences
from segrew.run_directory import CARD_FILE, read_json, read_jsonl, write_json
from segrew.segmentation import SegmentationConfig

SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "warmup_steps": 0, "dataset_test_split": "null", "tune": "full"}


def weights_of(path):
    return load_file(path / "model.safetensors")


def assert_same(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance, msg=name)


def margin(model: SegmentRewardModel, pair) -> float:
    chosen, rejected = model.score([pair.prompt] * 2, [pair.chosen, pair.rejected])
    return chosen.score - rejected.score


def test_one_step_on_one_pair_raises_its_margin(tmp_path, train, pairs_file):
    pair = load_preferences(str(pairs_file)).pairs[0]
    start = train(tmp_path / "a", max_pairs=1, max_steps=1, learning_rate=0, **SGD)
    stepped = train(tmp_path / "b", max_pairs=1, max_steps=1, learning_rate=0.1, **SGD)
    assert margin(stepped, pair) > margin(start, pair) + 1e-4


@pytest.mark.parametrize("aggregator", ["mean", "softmax"])
def test_the_logged_loss_is_bradley_terry_on_the_scores(tmp_path, train, pairs_file, aggregator):
    """Scores are taken from the saved model, the loss of the first step (at rate 0) from the log."""
    flags = SGD | {"aggregator": aggregator, "temperature": 0.5, "learning_rate": 0, "logging_steps": 1}
    model = train(tmp_path / "a", max_steps=1, per_device_train_batch_size=12, **flags)
    logged = read_jsonl(tmp_path / "a" / "metrics.jsonl")[0]["loss"]
    margins = torch.tensor([margin(model, pair) for pair in load_preferences(str(pairs_file)).pairs])
    assert logged == pytest.approx((1 + (-margins).exp()).log().mean().item(), abs=1e-4)


def test_same_seed_same_weights_other_seed_others(tmp_path, train):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tmp_path / name, max_steps=2, tune="lora", learning_rate=1e-2, dataset_test_split="null", seed=seed)
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    assert not torch.equal(weights_of(tmp_path / "a")["score.weight"], weights_of(tmp_path / "c")["score.weight"])


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_run_stopped_and_resumed_equals_the_uninterrupted_one(tmp_path, train, tune):
    flags = {"tune": tune, "learning_rate": 1e-2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    flags |= {"dataset_test_split": "null", "logging_steps": 1}
    train(tmp_path / "whole", **flags)
    shutil.copytree(
        tmp_path / "whole", tmp_path / "stopped", ignore=shutil.ignore_patterns("checkpoint-4", "*.safetensors")
    )
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "stopped" / "checkpoint-2", dirs_exist_ok=True)
    train(tmp_path / "stopped", resume_from_checkpoint="last", **flags)
    assert_same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped"), 1e-7)
    logs = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")]
    losses = [[row["loss"] for row in log if "loss" in row][-2:] for log in logs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("merge", [True, False])
def test_a_reward_model_finds_its_base_from_anywhere(tmp_path, train, tiny_dir, monkeypatch, merge):
    """Trained by relative names, read in another directory, moved with its base, and without it."""
    home, answers = tmp_path / "home", (["hi"], ["one two three"])
    shutil.copytree(tiny_dir, home / "base")
    monkeypatch.chdir(home)
    flags = SGD | {"model_name_or_path": "base", "tune": "lora", "lora_merge": merge, "max_steps": 1}
    trained = train(Path("rm"), **flags)
    expected = trained.score(*answers)[0].score
    monkeypatch.chdir(tmp_path)
    assert SegmentRewardModel.from_pretrained("home/rm").score(*answers)[0].score == pytest.approx(expected, abs=1e-5)
    home.rename("moved")
    if not merge:
        (tmp_path / "home").symlink_to("moved")  # the adapter's own record of its base is PEFT's
    moved = SegmentRewardModel.from_pretrained("moved/rm")
    assert moved.score(*answers)[0].score == pytest.approx(expected, abs=1e-5)
    if merge:
        (tmp_path / "moved" / "base").rename("away")
        with pytest.raises(ValueError, match=r"is no longer in .*home/base; put it back .* as base_model into segrew"):
            SegmentRewardModel.from_pretrained("moved/rm").score(*answers)


def test_a_run_is_not_resumed_with_other_settings(tmp_path, train):
    flags = {"tune": "lora", "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "dataset_test_split": "null"}
    train(tmp_path / "run", **flags)
    before = weights_of(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-1"
    other = {"lora_r": 4, "learning_rate": 0.5, "aggregator": "softmax", "bad_rows": "skip"}
    said = "lora_r 16, now 4; .*bad_rows 'error', now 'skip'; learning_rate 0.0001, now 0.5"
    for directory in ("run", "new"):  # the checkpoint may be another run's
        with pytest.raises(ValueError, match=rf"checkpoint-1 was made with other settings \(.*{said}\)"):
            train(tmp_path / directory, resume_from_checkpoint=checkpoint, **flags | other)
    assert_same(before, weights_of(tmp_path / "run"))
    train(tmp_path / "run", resume_from_checkpoint=checkpoint, **flags | {"max_steps": 3, "logging_steps": 1})
    (tmp_path / "run" / "run.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match=r"checkpoint-1: lies in no run"):
        train(tmp_path / "new", resume_from_checkpoint=checkpoint, **flags)


def test_gradient_accumulation_equals_a_larger_batch(tmp_path, train):
    flags = SGD | {"max_steps": 2, "learning_rate": 0.1, "max_grad_norm": 0}
    train(tmp_path / "a", **flags)
    train(tmp_path / "b", per_device_train_batch_size=2, gradient_accumulation_steps=2, **flags)
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"), 1e-5)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_activation_checkpointing_changes_nothing_but_memory(tmp_path, train, tune):
    flags = SGD | {"tune": tune, "max_steps": 2, "learning_rate": 0.1}
    train(tmp_path / "a", **flags)
    train(tmp_path / "b", activation_checkpointing=True, **flags)
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"), 1e-5)


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_checkpoint_is_what_is_written(tmp_path, train, pairs_file, greater):
    flags = {"tune": "full", "learning_rate": 1e-3, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    flags |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    flags |= {"eval_dataset_name": tmp_path / "eval.jsonl", "greater_is_better": greater, "max_pairs": 8}
    path = tmp_path / "run"
    shutil.copy(pairs_file, tmp_path / "eval.jsonl")
    train(path, **flags)
    losses = [row["eval_loss"] for row in read_jsonl(path / "metrics.jsonl") if "eval_loss" in row][:2]
    assert losses[0] != losses[1]
    best = 1 + losses.index((max if greater else min)(losses))
    assert_same(weights_of(path), weights_of(path / f"checkpoint-{best}"))


def test_dropout_is_off_whichever_way_a_model_has_it(tmp_path, train, tiny_dir):
    path = shutil.copytree(tiny_dir, tmp_path / "with_dropout")
    write_json(path / "config.json", read_json(path / "config.json") | {"attention_dropout": 0.5})
    flags = SGD | {"max_steps": 1, "learning_rate": 0.1}
    train(tmp_path / "a", **flags)
    train(tmp_path / "b", model_name_or_path=path, **flags)
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))


def test_b32_training_on_from_a_reward_model_starts_from_its_scores(tmp_path, train, pairs_file):
    pair = load_preferences(str(pairs_file)).pairs[0]
    first = train(tmp_path / "a", max_steps=2, **SGD | {"learning_rate": 0.1})
    again = train(tmp_path / "b", model_name_or_path=tmp_path / "a", max_steps=1, **SGD | {"learning_rate": 0})
    assert margin(again, pair) == pytest.approx(margin(first, pair), abs=1e-6)
    assert again.segmenter_fingerprint == first.segmenter_fingerprint and again.card.base_model == first.card.base_model
    with pytest.raises(ValueError, match="--tune head reads the states of the frozen segmenter"):
        train(tmp_path / "c", model_name_or_path=tmp_path / "a", tune="head")


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_b32_training_on_from_an_adapter_starts_from_its_scores(tmp_path, train, pairs_file, tune):
    pair = load_preferences(str(pairs_file)).pairs[0]
    first = train(tmp_path / "a", max_steps=2, lora_merge=False, **SGD | {"tune": "lora", "learning_rate": 0.1})
    flags = SGD | {"model_name_or_path": tmp_path / "a", "max_steps": 1, "tune": tune}
    same, moved = (train(tmp_path / str(rate), **flags | {"learning_rate": rate}) for rate in (0, 0.1))
    assert margin(same, pair) == pytest.approx(margin(first, pair), abs=1e-5)
    assert abs(margin(moved, pair) - margin(same, pair)) > 1e-5


def test_the_evaluation_is_reported_with_interval_and_baseline(tmp_path, train, pairs_file):
    shutil.copy(pairs_file, tmp_path / "eval.jsonl")
    with pytest.warns(UserWarning, match="12 of 12 evaluation pairs have a prompt that is trained on"):
        model = train(tmp_path / "a", tune="head", eval_dataset_name=tmp_path / "eval.jsonl")
    pairs = load_preferences(str(pairs_file)).pairs
    accuracy = sum(margin(model, pair) > 0 for pair in pairs) / len(pairs)
    summary = read_json(tmp_path / "a" / "evaluation.json")
    assert summary["accuracy"] == pytest.approx(accuracy) and summary["n"] == 12
    assert summary["length_baseline"] == sum(len(p.chosen) > len(p.rejected) for p in pairs) / 12
    low, high = summary["ci95"]
    assert low < accuracy <= high
    (row,) = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert row["train_accuracy"] == pytest.approx(accuracy) and row["train_loss"] < 0.6931


def test_b16_pairs_that_a_cut_makes_equal_are_counted(tmp_path, train, monkeypatch):
    same = "The same beginning of forty words and more. " * 12
    rows = [("Yes.", "No."), (same + "Good.", same + "Bad.")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", "chosen": c, "rejected": r}) + "\n" for c, r in rows))
    said: list[str] = []
    monkeypatch.setattr("rich.console.Console.print", lambda self, *words, **_: said.append(" ".join(map(str, words))))
    train(tmp_path / "a", dataset_name=path, tune="head", max_length=48)
    assert "1 training pairs left out: identical within --max_length" in said


def test_what_was_read_left_out_and_cut_is_kept_with_the_run(tmp_path, train):
    pair = {"prompt": "x", "chosen": "Yes.", "rejected": "No."}
    rows = [pair, pair | {"rejected": None}, pair | {"chosen": "Well. " * 30}, pair | {"rejected": "No, no."}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(tmp_path / "a", dataset_name=path, tune="head", max_length=48, overlong="drop")
    (record,) = read_json(tmp_path / "a" / "data.json").values()
    assert record["pairs"] == 2 and record["fitted"] == {"pairs left out: longer than --max_length": 1}
    (source,) = record["sources"]
    assert source["rows"] == 4 and source["used"] == 3 and source["skipped"] == {"empty answer": 1}
    assert read_json(tmp_path / "a" / "segrew.json")["overlong"] == "truncate_prompt_left"
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 3: \d+ tokens with its prompt, more than --max_length"):
        train(tmp_path / "b", dataset_name=path, tune="head", max_length=48, overlong="error")


def test_a_stage_and_a_mixture_of_local_sets_train_a_reward_model(tmp_path, train, pairs_file):
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        shutil.copy(pairs_file, tmp_path / "set" / f"{split}.jsonl")
    flags = {"dataset_name": tmp_path / "set", "stage_split": "20,40,40", "tune": "head", "max_length": 256}
    train(tmp_path / "a", **flags)
    record = read_json(tmp_path / "a" / "data.json")
    skipped = record["training"]["sources"][0]["skipped"]
    assert record["training"]["pairs"] == 12 - skipped["in another stage"] > 0
    assert record["evaluation"]["pairs"] == 12  # a held-out split is taken whole
    assert read_json(tmp_path / "a" / "run.json")["config"]["stage_split"] == "20,40,40"


def test_b44_a_tie_is_no_win():
    scores = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 4.0], [0.0, 0.0]])
    assert pair_metrics(scores) == {"accuracy": 0.25, "ties": 2.0, "margin": 0.0}


def test_evaluation_in_batches_equals_evaluation_at_once(tmp_path, train, pairs_file):
    shutil.copy(pairs_file, tmp_path / "eval.jsonl")
    found = []
    for size in (5, 12):
        path = tmp_path / str(size)
        train(path, eval_dataset_name=tmp_path / "eval.jsonl", per_device_eval_batch_size=size, max_steps=1,
              **{k: v for k, v in SGD.items() if k != "dataset_test_split"} | {"learning_rate": 0})  # fmt: skip
        row = next(row for row in read_jsonl(path / "metrics.jsonl") if "eval_margin" in row)
        found.append([row["eval_accuracy"], row["eval_margin"], row["eval_ties"]])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_the_released_convention_trains_and_is_kept(tmp_path, train):
    path = tmp_path / "a"
    model = train(path, tune="head", compat="dense_rlhf_release", quantile=0.7)
    assert read_json(path / "segrew.json")["segmentation"]["compat"] == "dense_rlhf_release"
    (record,) = model.score([[{"role": "user", "content": "Why?"}]], ["Because it is so."])
    assert sum(s.tokens for s in record.segments) == len(model.chat.response_ids("Because it is so.")) - 1
    with pytest.raises(ValueError, match="--compat dense_rlhf_release with --read_position content"):
        train(tmp_path / "b", compat="dense_rlhf_release", read_position="content")


def test_the_resolved_settings_are_in_the_run_folder(tmp_path, train):
    train(tmp_path / "a", tune="head", quantile=0.7)
    record = read_json(tmp_path / "a" / "run.json")
    assert record["command"] == "train-rm" and record["config"]["quantile"] == 0.7
    card = read_json(tmp_path / "a" / "segrew.json")
    assert card["segmentation"]["threshold"] > 0 and card["segmentation"]["quantile"] == 0.7


def test_bfloat16_trains_like_float32_without_an_accelerator(tmp_path, train):
    """TrainingArguments take bf16 for a wish for a GPU unless they are told that the CPU is meant."""
    options = {"max_steps": 2, "learning_rate": 0.01, **SGD}
    for name, bf16 in (("half", True), ("full", False)):
        train(tmp_path / name, bf16=bf16, **options)
    one, other = weights_of(tmp_path / "half"), weights_of(tmp_path / "full")
    assert_same(one, other, tolerance=0.02)
    assert any((one[name] != other[name]).any() for name in one)


def test_batches_keep_chosen_and_rejected_side_by_side(build_byte_tokenizer):
    chat = ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")
    pairs = [PreferencePair([{"role": "user", "content": "x"}], c, r) for c, r in (("aa", "bbb"), ("cccccccc", "d"))]
    data = segment_pairs(pairs, chat, SegmentationConfig(rule="response"), None, max_length=64)
    batch = collate([data[1], data[0]])
    rows = batch["conversations"].responses
    assert [chat.decode(row) for row in rows] == ["cccccccc", "d", "aa", "bbb"]
    assert (batch["unit_ids"] >= 0).sum(1).tolist() == [len(row) for row in rows]
    assert batch["unit_ids"].shape[1] == max(map(len, rows))


def test_a_head_that_is_fitted_has_no_checkpoint_to_resume(tmp_path, train):
    with pytest.raises(ValueError, match="--tune head fits its head in one go"):
        train(tmp_path / "a", tune="head", resume_from_checkpoint="latest")


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ({"tune": "head", "lora_r": 4, "learning_rate": 1e-3, "head_penalty": 1.0}, ["lora_r", "learning_rate"]),
        ({"tune": "full", "lora_r": 4, "learning_rate": 1e-3, "head_penalty": 1.0}, ["lora_r", "head_penalty"]),
        ({"tune": "lora", "lora_r": 4, "learning_rate": 1e-3, "head_penalty": 1.0}, ["head_penalty"]),
        ({"tune": "lora", "lora_r": 4, "optim": "sgd"}, []),
    ],
)
def test_flags_that_a_way_of_tuning_does_not_read_are_named(tmp_path, flags, unread):
    argv = [f"--{name}={value}" for name, value in (flags | {"output_dir": tmp_path}).items()]
    config, args = parse("train-rm", (RewardModelConfig, RewardTrainingArguments), argv)
    assert unread_flags(config, args) == unread


def test_a_run_says_which_flags_it_does_not_read(tmp_path, train):
    with pytest.warns(UserWarning, match="--head_penalty: without effect with --tune full"):
        train(tmp_path / "a", max_steps=1, head_penalty=1.0, **SGD)


def test_liger_kernels_reach_the_layers_and_the_trainer_adds_no_loss_of_a_language_model(tmp_path, train, monkeypatch):
    """As liger-kernel does it, told to: any forward but the layers' would end the training."""
    given = []
    monkeypatch.setattr("reward_models.train_config.check_liger_kernel", lambda: given.append("checked"))
    monkeypatch.setattr(
        "reward_models.train.apply_liger_kernel", lambda *models, kernels: given.append((models, kernels))
    )
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *_: given.append("by the Trainer"))
    train(tmp_path / "a", max_steps=1, learning_rate=0.1, use_liger_kernel=True, **SGD)
    assert given[0] == "checked" and "by the Trainer" not in given
    (((model, segmenter), kernels),) = (one for one in given if one != "checked")
    assert kernels is None and hasattr(model, "score") and hasattr(segmenter, "lm_head")


def test_a_length_beyond_the_context_is_refused_before_training(tmp_path, train):
    with pytest.raises(ValueError, match=r"--max_length 1025: the context of .* has 1024 tokens"):
        train(tmp_path / "a", max_length=1025)
    assert not (tmp_path / "a").exists()


def test_a_run_that_trains_nothing_is_refused(tmp_path, train):
    with pytest.raises(ValueError, match="--num_train_epochs 0: trains nothing"):
        train(tmp_path / "a", num_train_epochs=0)
    assert not (tmp_path / "a").exists()
    train(tmp_path / "b", num_train_epochs=0, max_steps=1, dataset_test_split="null")
    assert read_json(tmp_path / "b" / CARD_FILE)
