"""The trainer's own parts: mixed precision, several processes, what it logs and writes, and resuming in mid-epoch."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    TrainingArguments,
)

import reward_models.pair_trainer as pair_trainer
from reward_models.card import RewardModelCard
from reward_models.checkpoints import load_classifier
from reward_models.pair_trainer import PairTrainer, collate, scores_as_forward
from reward_models.pairs import segment_pairs
from reward_models.reading import read_head
from segrew.chat import ChatFormat
from segrew.cli import main
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.preferences import load_preferences
from segrew.run_directory import RunDirectory, read_json, read_jsonl
from segrew.segmentation import SegmentationConfig

ROOT = Path(__file__).parents[2]
STILL = {"optim": "sgd", "lr_scheduler_type": "constant", "warmup_steps": 0, "learning_rate": 0, "tune": "full"}
STILL |= {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 12, "dataset_test_split": "null"}


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def scores_of(model, pairs) -> list[tuple[float, float]]:
    records = model.score([p.prompt for p in pairs for _ in "ab"], [t for p in pairs for t in (p.chosen, p.rejected)])
    return [(records[2 * i].score, records[2 * i + 1].score) for i in range(len(pairs))]


def test_bfloat16_computes_the_trunk_in_bfloat16_and_the_head_in_float32(tmp_path, train, monkeypatch):
    seen = {}

    def spied(head, states):
        rewards = read_head(head, states)
        seen["head"] = rewards.dtype
        return rewards

    def model_of(name, **options):
        model = load_classifier(name, **options)
        layer = model.model.layers[0].self_attn.q_proj
        layer.register_forward_hook(lambda module, inputs, output: seen.update(layer=output.dtype))
        return model

    monkeypatch.setattr("reward_models.reading.read_head", spied)
    monkeypatch.setattr("reward_models.train.load_classifier", model_of)
    logged = {}
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        train(tmp_path / str(bf16), **STILL | {"bf16": bf16})
        assert seen == {"head": torch.float32, "layer": dtype}
        logged[bf16] = read_jsonl(tmp_path / str(bf16) / "metrics.jsonl")[0]["loss"]
    assert logged[True] == pytest.approx(logged[False], abs=0.02)
    assert all(weight.dtype == torch.float32 for weight in weights_of(tmp_path / "True").values())


@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="about machines without accelerator")
def test_float16_without_an_accelerator_is_refused_with_the_ways_out(tmp_path, train):
    with pytest.raises(ValueError, match=r"--fp16 true: float16 needs an accelerator.*--bf16 true"):
        train(tmp_path / "a", fp16=True, tune="full")


def test_the_forward_pass_is_the_stock_one_again_after_training(tmp_path, train):
    for tune in ("full", "lora"):
        model = train(tmp_path / tune, **STILL | {"tune": tune, "lora_merge": False}).model
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 1)


def test_margins_and_centering_enter_the_loss(tmp_path, train, pairs_file):
    """The logged loss at rate 0, against the formula on scores taken from the saved model."""
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    with_margins = tmp_path / "margins.jsonl"
    with_margins.write_text("".join(json.dumps(row | {"margin": i / 4}) + "\n" for i, row in enumerate(rows)))
    pairs = load_preferences(str(with_margins)).pairs
    assert [pair.margin for pair in pairs] == [i / 4 for i in range(12)]
    found = {}
    for name, flags in {"plain": {}, "both": {"center_rewards_coefficient": 3, "dataset_name": with_margins}}.items():
        model = train(tmp_path / name, **STILL | flags)
        found[name] = read_jsonl(tmp_path / name / "metrics.jsonl")[0]["loss"]
    scores = scores_of(model, pairs)
    bradley_terry = sum(math.log(1 + math.exp(i / 4 - (c - r))) for i, (c, r) in enumerate(scores)) / 12
    assert found["both"] == pytest.approx(bradley_terry + 3 * sum((c + r) ** 2 for c, r in scores) / 12, abs=1e-4)
    assert found["both"] != pytest.approx(found["plain"], abs=0.01)


def test_some_margins_and_some_not_is_refused(tmp_path, train, pairs_file):
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    rows[3]["margin"] = 1.0
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="11 of 12 pairs have no 'margin'"):
        train(tmp_path / "a", dataset_name=tmp_path / "some.jsonl", **STILL)
    with pytest.raises(ValueError, match="11 of 12 pairs have no 'margin'"):  # of the evaluation, before training
        train(tmp_path / "e", eval_dataset_name=tmp_path / "some.jsonl", **STILL)
    assert not (tmp_path / "e").exists()
    rows[4]["margin"] = "much"
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"some\.jsonl, line 5: column 'margin' is 'much'; it must be a finite number"):
        train(tmp_path / "b", dataset_name=tmp_path / "some.jsonl", **STILL)


@pytest.mark.parametrize("tune", ["full", "head"])
def test_an_evaluation_logs_its_numbers_and_writes_scored_pairs(tmp_path, train, pairs_file, tune):
    shutil.copy(pairs_file, tmp_path / "eval.jsonl")
    flags = STILL | {"tune": tune, "eval_dataset_name": tmp_path / "eval.jsonl", "num_print_samples": 5}
    flags |= {"per_device_eval_batch_size": 5, "eval_strategy": "steps", "eval_steps": 1}
    model = train(tmp_path / "a", **flags)
    pairs = load_preferences(str(pairs_file)).pairs
    scores = scores_of(model, pairs)
    row = next(row for row in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "eval_loss" in row)
    losses = [math.log(1 + math.exp(r - c)) for c, r in scores]
    assert row["eval_loss"] == pytest.approx(sum(losses) / 12, abs=1e-3)  # of pairs, not of uneven batches
    assert row["eval_margin"] == pytest.approx(sum(c - r for c, r in scores) / 12, abs=1e-3)
    assert row["eval_ties"] == 0 and row["eval_accuracy"] == sum(c > r for c, r in scores) / 12
    (file,) = sorted((tmp_path / "a" / "scored_pairs").iterdir())
    assert file.name == "step-000001.jsonl"
    table = read_jsonl(file)
    assert [line["id"] for line in table] == [pair.id for pair in pairs[:5]]
    for line, pair, (chosen, rejected) in zip(table, pairs, scores, strict=False):
        assert (line["chosen"], line["rejected"]) == (pair.chosen, pair.rejected)
        assert (line["score_chosen"], line["score_rejected"]) == pytest.approx((chosen, rejected), rel=1e-4, abs=1e-4)
    counts = [len(r.segments) for p in pairs[:5] for r in model.score([p.prompt] * 2, [p.chosen, p.rejected])]
    assert [n for line in table for n in (line["units_chosen"], line["units_rejected"])] == counts


@pytest.fixture(scope="module")
def ten_pairs(tiny_dir, short_pairs):
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(tiny_dir)))
    rule = SegmentationConfig(rule="ngram", n=4)
    data = segment_pairs(short_pairs[:10], chat, rule, None, max_length=256)
    return data, RewardModelCard(rule, "tiny", "", chat.fingerprint)


def test_b34_resuming_in_mid_epoch_goes_on_with_the_next_pair(tmp_path, tiny_dir, ten_pairs, monkeypatch):
    """Ten pairs one by one, four to an update but at the epoch's end: six updates in two epochs, each resumed from."""
    data, card = ten_pairs
    consumed: list[int] = []

    def seen(items):
        consumed.extend(item.place for item in items)
        return collate(items)

    monkeypatch.setattr(pair_trainer, "collate", seen)

    def run(path: Path, checkpoint: Path | None = None) -> tuple[dict, dict]:
        consumed.clear()
        torch.manual_seed(0)
        model = load_classifier(tiny_dir, new_head=True, dtype=torch.float32)
        arguments = TrainingArguments(
            str(path), per_device_train_batch_size=1, gradient_accumulation_steps=4, num_train_epochs=2, seed=3,
            save_strategy="steps", save_steps=1, logging_steps=1, learning_rate=1e-2, use_cpu=True, report_to="none",
            disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        path.mkdir(exist_ok=True)
        with scores_as_forward(model, card):
            trainer = PairTrainer(model, RunDirectory(path), args=arguments, train_dataset=data)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        state = {"steps": trainer.state.global_step, "rate": trainer.lr_scheduler.get_last_lr()}
        return {name: weight.clone() for name, weight in model.state_dict().items()}, state

    whole, state = run(tmp_path / "whole")
    ids, lines = list(consumed), read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert state["steps"] == 6 and sorted(ids[:10]) == sorted(ids[10:]) == list(range(10)) and ids[:10] != ids[10:]
    optimizer = torch.load(tmp_path / "whole" / "checkpoint-6" / "optimizer.pt")["state"]
    pairs_before = [4, 8, 10, 14, 18]
    for step, done in enumerate(pairs_before, 1):
        path = tmp_path / f"from{step}"
        again, resumed = run(path, tmp_path / "whole" / f"checkpoint-{step}")
        assert consumed[-len(ids[done:]) :] == ids[done:] and resumed == state
        assert all(torch.allclose(again[name], whole[name], atol=1e-7, rtol=0) for name in whole)
        for key, moments in torch.load(path / "checkpoint-6" / "optimizer.pt")["state"].items():
            assert all(torch.allclose(value, optimizer[key][name], atol=1e-7) for name, value in moments.items())
        losses = [[row["loss"] for row in log if "loss" in row] for log in (lines, read_jsonl(path / "metrics.jsonl"))]
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_b34_resuming_repeats_no_line_of_the_log(tmp_path, train):
    flags = STILL | {"max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "a", **flags)
    before = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    shutil.rmtree(tmp_path / "a" / "checkpoint-4")
    train(tmp_path / "a", resume_from_checkpoint="last", **flags)
    after = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in after] == [row["step"] for row in before] == [1, 2, 3, 4, 4]
    assert [row.get("loss") for row in after] == pytest.approx([row.get("loss") for row in before], nan_ok=True)


def test_what_is_logged_is_said_in_words(tmp_path, tiny_dir, pairs_file, capfd):
    flags = {"model_name_or_path": tiny_dir, "dataset_name": pairs_file, "eval_dataset_name": pairs_file}
    flags |= {"dataset_test_split": "train", "max_steps": 2, "logging_steps": 1, "eval_strategy": "steps"}
    flags |= {"eval_steps": 2, "save_strategy": "no", "output_dir": tmp_path / "a", "tune": "full", "bf16": False}
    assert main(["train-rm", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]) == 0
    said = "".join(capfd.readouterr())
    logged = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert f"step 1: loss {logged[0]['loss']:.4f}, gradient norm {logged[0]['grad_norm']:.3g}, rate" in said
    assert "step 2: held-out loss" in said and "2 updates in 0:00:" in said and "pairs a second; mean loss" in said
    assert "{'" not in said and "it/s" not in said and "Held-out accuracy" in said


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_b32_the_head_is_trained_saved_and_missed(tmp_path, train, tune):
    """The head of step 5 is no longer that of step 0, it is the one in memory, and no run goes on without it."""
    flags = STILL | {"tune": tune, "learning_rate": 1e-2, "optim": "adamw_torch", "save_strategy": "steps"}
    flags |= {"save_steps": 5, "lora_merge": False}
    with pytest.warns(UserWarning, match=r"has no reward head") as said:
        start = train(tmp_path / "start", **flags | {"learning_rate": 0})
        model = train(tmp_path / "run", **flags | {"max_steps": 5})
    assert sum("has no reward head" in str(warning.message) for warning in said) == 2  # once for each run
    name = "adapter_model.safetensors" if tune == "lora" else "model.safetensors"
    checkpoint = tmp_path / "run" / "checkpoint-5"
    weights = load_file(checkpoint / name)
    (key,) = (key for key in weights if "score" in key)
    assert torch.equal(weights[key], model.head.weight.detach()) and not torch.equal(weights[key], start.head.weight)
    del weights[key]
    save_file(weights, checkpoint / name, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint-5: the head, score\.weight, is not among the weights"):
        train(tmp_path / "run", resume_from_checkpoint="last", **flags | {"max_steps": 6})
    shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="--resume_from_checkpoint last: no checkpoint there"):
        train(tmp_path / "run", resume_from_checkpoint="last", **flags | {"max_steps": 6})


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, sliding_window=64),
    "phi3": Phi3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=64),
    "gpt2": GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tune", ["full", "lora", "head"])
def test_each_family_trains_a_step_and_loads_again(tmp_path, train, build_byte_tokenizer, family, tune):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "start")
    build_byte_tokenizer().save_pretrained(tmp_path / "start")
    flags = {"model_name_or_path": tmp_path / "start", "chat_template": "raw", "max_pairs": 2, "max_length": 96}
    flags |= {"max_steps": 1, "learning_rate": 1e-2, "dataset_test_split": "null", "tune": tune}
    model = train(tmp_path / "a", **flags)
    again = type(model).from_pretrained(tmp_path / "a")
    question = [{"role": "user", "content": "Why?"}]
    one, other = (m.score([question], ["Because of this, I think."])[0].score for m in (model, again))
    assert one == pytest.approx(other, abs=1e-4) and math.isfinite(one)


@pytest.mark.parametrize("aggregator, tune", [("max", "full"), ("min", "lora"), ("last", "full"), ("max", "head")])
def test_the_order_statistics_train_and_are_read_back(tmp_path, train, aggregator, tune):
    train(tmp_path / "a", aggregator=aggregator, tune=tune, max_steps=1, dataset_test_split="null")
    model = load_classifier(tmp_path / "a")
    assert read_json(tmp_path / "a" / "segrew.json")["aggregator"] == aggregator and model.score.weight.abs().max() > 0


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(tmp_path, train, tiny_dir, pairs_file):
    """Real processes over gloo; each takes two pairs of every batch of four, of two updates."""
    flags = STILL | {"max_steps": 2, "learning_rate": 0.1, "max_grad_norm": 0, "save_strategy": "no", "bf16": False}
    shutil.copy(pairs_file, tmp_path / "eval.jsonl")
    flags |= {"model_name_or_path": tiny_dir, "dataset_name": pairs_file, "disable_tqdm": True, "use_cpu": True}
    flags |= {"eval_dataset_name": tmp_path / "eval.jsonl", "per_device_eval_batch_size": 5, "rule": "ngram", "n": 3}
    flags.pop("dataset_test_split")
    train(tmp_path / "one", **flags | {"per_device_train_batch_size": 4})
    flags |= {"per_device_train_batch_size": 2, "output_dir": tmp_path / "two"}
    (tmp_path / "two.yaml").write_text("".join(f"{name}: '{value}'\n" for name, value in flags.items()))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "segrew"]
    done = subprocess.run(
        [*start, "train-rm", "--config", str(tmp_path / "two.yaml")],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    assert not torch.allclose(one["score.weight"], load_start_head(tmp_path, train), atol=1e-4)
    logs = [read_jsonl(tmp_path / name / "metrics.jsonl")[-1] for name in ("one", "two")]
    assert logs[0]["eval_loss"] == pytest.approx(logs[1]["eval_loss"], abs=1e-5)
    assert len(read_jsonl(tmp_path / "two" / "scored_pairs" / "step-000002.jsonl")) == 12


@pytest.mark.slow
def test_two_processes_that_divide_the_weights_equal_one(tmp_path, train, launch, tiny_dir, pairs_file):
    """FSDP2 by the shipped configuration, in float32 and on the CPU, for which divided.py stands in for two GPUs."""
    flags = STILL | {"max_steps": 2, "learning_rate": 0.1, "max_grad_norm": 0, "save_strategy": "no", "bf16": False}
    flags |= {"rule": "ngram", "n": 3}
    train(tmp_path / "one", **flags | {"per_device_train_batch_size": 4})
    flags |= {"model_name_or_path": tiny_dir, "dataset_name": pairs_file, "disable_tqdm": True, "tune": "full"}
    flags |= {"per_device_train_batch_size": 2, "output_dir": tmp_path / "two"}
    (tmp_path / "two.yaml").write_text("".join(f"{name}: '{value}'\n" for name, value in flags.items()))
    program = ROOT / "tests/reward_models/divided.py", "train-rm", "--config", tmp_path / "two.yaml"
    done = launch(tmp_path, *program, config="fsdp2", mixed_precision="no")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "divided: 1" in done.stdout
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def load_start_head(tmp_path, train) -> torch.Tensor:
    return train(tmp_path / "start", **STILL).model.score.weight.detach()


def test_zero3_is_refused(tmp_path, train, monkeypatch):
    monkeypatch.setattr(pair_trainer, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="ZeRO-3 would divide the frozen segmenter"):
        train(tmp_path / "a", **STILL)


def test_another_segmenter_may_cut_if_it_has_the_same_vocabulary(tmp_path, train, tiny_dir, build_byte_tokenizer):
    other = shutil.copytree(tiny_dir, tmp_path / "other")
    model = load_causal_lm(str(other), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(other)
    cut = train(tmp_path / "a", segmenter_name_or_path=other, **STILL)
    assert cut.card.base_model == str(other) and cut.segmenter() is not None
    build_byte_tokenizer().save_pretrained(other)
    with pytest.raises(ValueError, match=r"--segmenter_name_or_path .*have another id"):
        train(tmp_path / "b", segmenter_name_or_path=other, **STILL)
