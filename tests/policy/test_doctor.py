"""A sound tiny model passes every check, and a planted fault of each kind is found by the check that is for it."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from policy.doctor import CHECKS, diagnose, examine, main, table_of
from policy.doctor_subject import DoctorConfig, Finding, Subject
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.card import RewardModelCard
from segrew.chat import ChatFormat
from segrew.cli import main as segrew
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint
from segrew.segmentation import SegmentationConfig

EVERY = {name: check for checks in CHECKS.values() for name, check in checks.items()}
CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
OPENED = CHATML + "{% if add_generation_prompt %}<assistant>{% endif %}"
PAIRS = [
    ("Name a colour.", "Blue.", "No."),
    ("What is two and two, and why?", "Four, by counting.", "Five!"),
    ("Say hi.", "Hi there, nice to meet you.", "…"),
    ("Name a river in Europe, please.", "The Loire, in France.", "The Nile"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"id": str(i), "prompt": p, "chosen": c, "rejected": r} for i, (p, c, r) in enumerate(PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory, build_tokenizer, build_tiny_config) -> Path:
    path = tmp_path_factory.mktemp("sound")
    torch.manual_seed(1)
    model = LlamaForCausalLM(build_tiny_config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)  # past the initial scale, where attention hardly matters
        model.lm_head.weight.mul_(3)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sound_reward(tmp_path_factory, sound, build_tiny_config) -> Path:
    path = tmp_path_factory.mktemp("sound_reward")
    torch.manual_seed(2)
    model = LlamaForSequenceClassification(build_tiny_config(num_labels=1))
    with torch.no_grad():
        model.score.weight.mul_(10)
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(sound)))
    card = RewardModelCard(
        segmentation=SegmentationConfig(threshold=5.2),
        base_model=str(sound),
        segmenter_fingerprint=model_fingerprint(load_causal_lm(str(sound), dtype=torch.float32)),
        tokenizer_fingerprint=chat.fingerprint,
        max_length=512,
    )
    fit = LocationNormalizer.from_parameters(0.1, 0.01, 0.0, 0.5, fingerprint=card.fingerprint, rule="entropy>5.2")
    fit.fitted_range = (0.001, 1.0)
    SegmentRewardModel(model, chat, card, fit).save_pretrained(path)
    return path


@pytest.fixture
def subject(sound, sound_reward, pairs):
    """A subject of sound files; a planted part stands in for what would be loaded."""

    def build(*, model: Path | None = sound, reward: Path | None = sound_reward, parts=None, **settings) -> Subject:
        names = {"model_name_or_path": model and str(model), "reward_model": reward and str(reward)}
        return Subject(DoctorConfig(**names, dataset_name=pairs, **settings), **(parts or {}))

    return build


@pytest.fixture
def spoiled(sound, sound_reward, tmp_path):
    """A copy of a directory, to be spoiled."""

    def copy(which: str = "model") -> Path:
        return Path(shutil.copytree(sound if which == "model" else sound_reward, tmp_path / which))

    return copy


@pytest.fixture
def written(tmp_path, sound):
    """The sound model with another tokenizer."""

    def write(tokenizer, template: str | None = None) -> Path:
        path = Path(shutil.copytree(sound, tmp_path / "written"))
        (path / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        return path

    return write


def found(subject: Subject, name: str, status: str, words: str = "") -> Finding:
    finding = diagnose(subject, EVERY[name])
    assert finding.status == status, finding
    assert words in finding.measured + " " + finding.remedy, finding
    assert bool(finding.remedy) == (status in ("warning", "fault")), finding
    return finding


def test_sound_models_pass_every_check(subject):
    results = [result for result in examine(subject()) if result.group != "this machine"]
    assert {result.status for result in results} == {"ok"}, [r for r in results if r.status != "ok"]
    assert len(results) == len(EVERY) - len(CHECKS["this machine"])


def test_without_models_there_is_only_the_machine(subject):
    for result in examine(subject(model=None, reward=None)):
        assert (result.status == "skipped") == (result.group != "this machine") or result.name == "attention", result


# Files


def test_a_missing_weight_or_head_is_told_once(subject, spoiled):
    for which, name, check in (
        ("model", "model.layers.0.mlp.up_proj.weight", "language model"),
        ("reward", "score.weight", "reward model"),
    ):
        path = spoiled(which)
        weights = load_file(path / "model.safetensors")
        del weights[name]
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        patient = subject(**{which: path})
        found(patient, check, "fault", name.removeprefix("model."))
        later = diagnose(patient, EVERY["decoding" if which == "model" else "head"])
        assert later.status == "skipped" and "not usable" in later.measured


def test_weights_that_are_no_numbers(subject):
    patient = subject()
    patient.part("model").model.layers[1].mlp.up_proj.weight.data[0, :3] = torch.nan
    assert found(patient, "weights", "fault", "layers.1.mlp.up_proj").value == 3


def test_a_tokenizer_without_template(subject, written, build_tokenizer):
    found(subject(model=written(build_tokenizer())), "chat template", "fault", "--chat_template")


def test_tokens_without_embedding_and_a_reward_model_of_other_tokens(subject, written, spoiled, build_tokenizer):
    more = build_tokenizer()
    template = more.chat_template
    more.add_tokens(["new one"])
    found(subject(model=written(more, template)), "vocabulary", "fault", "'new one' (id 259)")
    path = spoiled("reward")
    build_tokenizer(swapped=("x", "y")).save_pretrained(path)
    card = json.loads((path / "segrew.json").read_text())
    card["tokenizer_fingerprint"] = ChatFormat.from_tokenizer(load_tokenizer(str(path))).fingerprint
    (path / "segrew.json").write_text(json.dumps(card))
    found(subject(reward=path), "same tokens", "fault", "token 'x'")


def test_no_room_for_answers(subject):
    found(subject(max_new_tokens=500), "context", "fault", "the model's context has 512")
    found(subject(max_length=100), "reward model's length", "warning", "of 100 tokens")


def test_a_reward_model_that_claims_more_than_its_context(subject, spoiled):
    path = spoiled("reward")
    card = json.loads((path / "segrew.json").read_text())
    (path / "segrew.json").write_text(json.dumps(card | {"max_length": 513}))
    patient = subject(reward=path)
    found(patient, "reward model's length", "fault", "max_length 513 of 512 positions")
    assert patient.part("reward_model").card.max_length == 512  # what is read stays within


def test_a_reward_model_is_no_language_model(subject, sound, sound_reward):
    found(subject(model=sound_reward), "language model", "fault", "is a reward model (segrew.json)")
    assert str(sound) in diagnose(subject(model=sound_reward), EVERY["language model"]).remedy


def test_generation_settings_of_other_programs(subject):
    patient = subject()
    settings = patient.part("model").generation_config
    settings.eos_token_id = [1]
    found(patient, "stop tokens", "warning", "Add 2 ('<|im_end|>'")
    settings.eos_token_id = 5000
    found(patient, "stop tokens", "fault", "[5000] of 259")
    settings.top_k = 20
    found(patient, "sampling settings", "warning", "top_k 20")
    settings.top_k, settings.repetition_penalty = None, 1.2
    found(patient, "sampling settings", "warning", "repetition_penalty 1.2")


# Text and tokens


@pytest.mark.parametrize(
    ("adds_bos", "written_bos", "status", "words"),
    [
        (False, 1, "ok", "1 at the head"),
        (False, 0, "warning", "0 at the head"),
        (True, 0, "ok", "1 at the head"),
        (True, 1, "warning", "2 where special tokens are added"),
        (False, 2, "fault", "2 at the head"),
    ],
)
def test_bos_is_counted(subject, written, build_byte_tokenizer, adds_bos, written_bos, status, words):
    path = written(build_byte_tokenizer(adds_bos=adds_bos), "<s>" * written_bos + OPENED)
    found(subject(model=path, reward=None), "BOS", status, words)


def test_a_template_that_writes_no_stop_token(subject):
    found(subject(reward=None, chat_template="raw"), "stop token", "warning", "none after an answer")


def test_pad_tokens(subject, spoiled):
    for pad in (None, "<|im_end|>"):
        patient = subject(reward=None)
        patient.part("chat").tokenizer.pad_token = pad
        found(patient, "pad token", "warning", "Set pad_token to '<pad>'" if pad is None else "pads and ends")
    path = spoiled("reward")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": 2}))
    found(subject(reward=path), "pad token", "fault", "config.json")
    found(subject(reward=path), "stock reading", "fault", "padding with id 2")


def test_templates_with_the_date_and_without_system_role(subject, written, build_byte_tokenizer):
    dated = "{{ strftime_now('%d %b %Y') }}" + OPENED
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + OPENED
    path = written(build_byte_tokenizer(), dated)
    found(subject(model=path, reward=None), "date", "warning", "1 calls")
    found(subject(model=path, reward=None), "system role", "ok")
    shutil.rmtree(path)
    path = written(build_byte_tokenizer(), strict)
    found(subject(model=path, reward=None), "system role", "warning", "--system_role error")
    found(subject(model=path, reward=None), "date", "ok")


def test_the_border_between_prompt_and_answer(subject, written, build_byte_tokenizer):
    path = written(build_byte_tokenizer(), CHATML)  # asks without opening the assistant's turn
    assert found(subject(model=path, reward=None), "prompt and answer", "fault", "has '<assistant>").value == 8
    shutil.rmtree(path)
    path = written(build_byte_tokenizer(merges=((">", "B"), (">", "F"))), OPENED)
    assert found(subject(model=path, reward=None), "prompt and answer", "warning", "merge across").value == 3


def test_tokenizers_that_lose_text(subject, written, build_tokenizer):
    lower, composed = build_tokenizer(), build_tokenizer()
    template = lower.chat_template
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    path = written(lower, template)
    assert found(subject(model=path, reward=None), "round trip", "fault", "becomes 'b").value == 7
    shutil.rmtree(path)
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    found(subject(model=written(composed, template), reward=None), "round trip", "warning", "an awkward text did")


# Numbers


def leak(module, inputs, output):
    """Let rows of a batch see each other."""
    return output + 10 * output.mean((0, 1), keepdim=True)


def without_mask(module, args, kwargs):
    """Let rows see their padding."""
    mask = kwargs.get("attention_mask")
    return args, kwargs if mask is None else kwargs | {"attention_mask": torch.ones_like(mask)}


def test_rows_that_see_each_other(subject, sound_reward):
    for part in ("model", "reward_model"):
        patient = subject()
        loaded = patient.part(part)
        trunk = loaded.model if part == "model" else loaded.model.model
        trunk.layers[0].mlp.register_forward_hook(leak)
        found(patient, "batch 1 and N", "fault", "batch size of 1")
        found(patient, "packed and padded", "fault")
    found(patient, "scores, batch 1 and N", "fault")


def test_rows_that_see_their_padding(subject):
    patient = subject(reward=None)
    patient.part("model").model.register_forward_pre_hook(without_mask, with_kwargs=True)
    found(patient, "padding side", "fault", "padded on the left")
    found(patient, "decoding", "fault")
    found(patient, "batch 1 and N", "ok")


def test_packed_rows_that_leak(subject, monkeypatch):
    def whole(query, key, value, packed, **_):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    monkeypatch.setattr("segrew.packed_attention._by_blocks", whole)
    found(subject(reward=None), "packed and padded", "fault", "Packed rows leak")


def test_a_model_that_cannot_be_packed_is_no_fault(subject, monkeypatch):
    patient = subject(reward=None)
    monkeypatch.setattr(type(patient.part("model").model), "_is_stateful", True)
    found(patient, "packed and padded", "skipped", "carry a state")
    found(patient, "batch 1 and N", "ok")


@pytest.mark.parametrize(
    ("check", "weight", "factor", "words"),
    [("bfloat16", "lm_head.weight", 300.0, "--bf16 false"), ("float16", "model.norm.weight", 1e6, "overflow")],
)
def test_weights_that_sixteen_bits_do_not_hold(subject, spoiled, check, weight, factor, words):
    path = spoiled()
    weights = load_file(path / "model.safetensors")
    weights[weight] = weights[weight] * factor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found(subject(model=path, reward=None), check, "warning", words)


def test_the_kl_at_step_0(subject, sound):
    other = load_causal_lm(str(sound), dtype=torch.bfloat16)
    found(subject(reward=None, parts={"reference": other}), "KL at step 0", "fault", "one dtype")
    patient = subject(reward=None)
    model = patient.part("model")
    assert model.config.attention_dropout > 0  # which PPO turns off
    found(patient, "KL at step 0", "ok")
    model.model.layers[0].register_forward_hook(
        lambda module, _, output: torch.nn.functional.dropout(output, 0.3, module.training)
    )
    assert found(patient, "KL at step 0", "fault", "dropout").value > 0.01


# Rewards


def test_another_segmenter(subject, sound_reward):
    patient = subject()
    rewards = patient.part("reward_model")
    rewards.card = replace(rewards.card, segmenter_fingerprint="0" * 16)
    found(patient, "segmenter", "fault", "other weights")


def test_heads_that_are_new_or_zero(subject):
    patient = subject()
    weight = patient.part("reward_model").head.weight
    torch.manual_seed(0)
    with torch.no_grad():
        torch.nn.init.normal_(weight, std=1 / 33)
        if diagnose(patient, EVERY["head"]).status == "ok":  # right by chance: turn it around
            weight.neg_()
            patient = subject(parts={"reward_model": patient.part("reward_model")})
    found(patient, "head", "warning", "new head")
    with torch.no_grad():
        weight.zero_()
    patient = subject(parts={"reward_model": patient.part("reward_model")})
    found(patient, "head", "fault", "one score")


def test_normalizers_that_are_missing_foreign_or_out_of_range(subject):
    patient = subject()
    rewards = patient.part("reward_model")
    fit = rewards.normalizer
    fit.fitted_range = (0.2, 1.0)
    found(patient, "normalizer's range", "warning", "fitted from 0.2")
    fit.fitted_range = None
    found(patient, "normalizer's range", "ok", "given parameters")
    fit.w_sigma = 0.5  # the line for the spread falls to the floor before the first unit
    found(patient, "normalizer's range", "warning", "below the floor")
    fit.fingerprint = "another rule's"
    found(patient, "normalizer", "fault", "segrew calibrate")
    rewards.normalizer = None
    found(patient, "normalizer", "warning", "segrew calibrate")
    found(patient, "normalizer's range", "skipped", "normalizer.json")


# The machine


def test_what_the_machine_cannot_do(subject, monkeypatch):
    bare = subject(model=None, reward=None)

    def no_sandbox():
        raise ValueError("programs cannot be run safely; install bubblewrap")

    found(bare, "bfloat16 units", "warning", "float32")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    found(bare, "bfloat16 units", "ok")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    assert found(bare, "processors", "warning", "OMP_NUM_THREADS").value == 64
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    found(bare, "processors", "ok")
    monkeypatch.setattr("policy.doctor_machine.trusted_launcher", no_sandbox)
    found(bare, "sandbox for programs", "warning", "bubblewrap")
    monkeypatch.setattr("policy.doctor_machine.trusted_launcher", lambda: SimpleNamespace(name="bubblewrap"))
    found(bare, "sandbox for programs", "ok")
    monkeypatch.setattr("policy.doctor_machine.available_memory", lambda: 10**6)
    found(subject(), "memory", "warning", "--use_peft true")
    monkeypatch.setitem(sys.modules, "spacy", None)
    found(bare, "parser (extra)", "warning", "segrew[parse]")


def test_cuda_without_triton(subject, monkeypatch):
    bare = subject(model=None, reward=None)
    if not torch.cuda.is_available():
        found(bare, "CUDA device", "warning", "CUDA build")
        found(bare, "attention", "skipped")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("policy.doctor_machine.find_spec", lambda _: None)
    found(bare, "attention", "fault", "triton")


# The command


def test_exit_status_and_json(sound, sound_reward, pairs, capsys, monkeypatch):
    fast = {"files": CHECKS["files"], "rewards": CHECKS["rewards"]}
    monkeypatch.setattr("policy.doctor.CHECKS", fast)
    names = ["--model_name_or_path", str(sound), "--reward_model", str(sound_reward), "--dataset_name", pairs]
    assert segrew(["doctor", *names, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "ok" and record["counts"] == {"ok": sum(map(len, fast.values()))}
    assert [check["name"] for check in record["checks"]] == [name for checks in fast.values() for name in checks]
    assert main([*names, "--json", "--max_new_tokens", "900"]) == 1
    record = json.loads(capsys.readouterr().out)
    faults = [check for check in record["checks"] if check["status"] == "fault"]
    assert [check["name"] for check in faults] == ["context"] and "--max_new_tokens 900" in faults[0]["remedy"]
    assert segrew(["doctor", "--max_new_tokens", "0"]) == 2


def test_the_table_fits_80_columns_and_folds_what_was_skipped(subject):
    from rich.console import Console

    results = list(examine(subject(reward=None, max_new_tokens=900)))
    with (console := Console(width=80, no_color=True)).capture() as capture:
        console.print(table_of(results))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("no --reward_model" in line for line in lines) == 1
    context = next(line for line in lines if line.strip().startswith("context"))
    assert context.split()[1] == "fault"


def test_every_check_says_what_it_checks():
    assert all(check.__doc__ and check.__doc__.endswith(".") for check in EVERY.values())
