"""Reward-model directories as any other program reads them, in a process of its own."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaForSequenceClassification

from reward_models import SegmentRewardModel
from reward_models.checkpoints import config_of, load_classifier, write_for_older_readers
from segrew.run_directory import read_json, write_json

KINDS = {
    "full": {"tune": "full", "learning_rate": 1e-3},
    "merged": {"tune": "lora", "learning_rate": 1e-2},
    "adapter": {"tune": "lora", "learning_rate": 1e-2, "lora_merge": False},
    "head": {"tune": "head"},
}
PROMPT = [{"role": "user", "content": "Why is the sky blue?"}]
ANSWERS = ["Air scatters blue light the most.", "No.", "Because 🙂 of the sea,\nit is said; but that is wrong."]

READER = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification
torch.manual_seed(int(sys.argv[2]))
task, found = json.load(open(sys.argv[1])), {}
for name, path in task["paths"].items():
    options = {"num_labels": 1} if name == "adapter" else {}
    model = AutoModelForSequenceClassification.from_pretrained(path, **options).eval()
    pad = model.config.pad_token_id
    rows, width = task["rows"], max(map(len, task["rows"]))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
        batch = model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()
    found[name] = [alone, batch, model.num_labels]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory, train):
    """One reward model of each kind, trained for two steps where it is trained by steps."""
    root = tmp_path_factory.mktemp("kinds")
    for name, flags in KINDS.items():
        train(root / name, max_steps=2, rule="response", dataset_test_split="null", **flags)
    return {name: root / name for name in KINDS}


@pytest.mark.slow
def test_every_kind_loads_plainly_in_a_fresh_process_and_reads_at_the_stop_token(tmp_path, directories):
    chat = SegmentRewardModel.from_pretrained(directories["head"]).chat
    rows = [chat.prompt_ids(PROMPT) + chat.response_ids(text) for text in ANSWERS]
    assert all(row[-1] == chat.stop_id for row in rows)
    expected = {}
    for name, path in directories.items():
        scored = SegmentRewardModel.from_pretrained(path).score([PROMPT] * 3, ANSWERS)
        expected[name] = [record.score for record in scored]
    assert expected["merged"] == pytest.approx(expected["adapter"], abs=1e-5)
    assert len({round(expected[name][0], 4) for name in ("full", "merged", "head")}) == 3
    (tmp_path / "task.json").write_text(
        json.dumps({"paths": {k: str(v) for k, v in directories.items()}, "rows": rows})
    )
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "task.json"), "123"], capture_output=True, text=True, check=True
    )
    for name, (alone, batch, labels) in json.loads(done.stdout).items():
        assert alone == pytest.approx(expected[name], rel=1e-6, abs=1e-5), name
        assert batch == pytest.approx(expected[name], rel=1e-6, abs=1e-5), name
        assert labels == 1


def test_weights_have_moved_where_they_were_to(directories, tiny_dir):
    start = load_file(tiny_dir / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = {
        kind: not torch.equal(load_file(path / "model.safetensors")[name], start[name])
        for kind, path in directories.items()
        if kind != "adapter"
    }
    assert moved == {"full": True, "merged": True, "head": False}


def test_b31_the_adapter_carries_its_head(directories):
    weights = load_file(directories["adapter"] / "adapter_model.safetensors")
    assert any("score" in name for name in weights) and any("lora_B" in name for name in weights)
    text = (directories["adapter"] / "README.md").read_text()
    assert "num_labels=1, pad_token_id=0" in text


def test_b31_two_loads_under_different_seeds_agree(directories):
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded = SegmentRewardModel.from_pretrained(directories["adapter"])
        scores.append([record.score for record in loaded.score([PROMPT] * 3, ANSWERS)])
    assert scores[0] == scores[1]


def test_b31_merging_an_adapter_changes_no_score(tmp_path, directories):
    loaded = SegmentRewardModel.from_pretrained(directories["adapter"])
    before = [record.score for record in loaded.score([PROMPT] * 3, ANSWERS)]
    loaded.save_pretrained(tmp_path)
    for model in (loaded, SegmentRewardModel.from_pretrained(tmp_path)):
        assert [record.score for record in model.score([PROMPT] * 3, ANSWERS)] == pytest.approx(before, abs=1e-5)
    assert not (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("kind, file", [("full", "model.safetensors"), ("adapter", "adapter_model.safetensors")])
def test_b31_a_missing_head_is_refused_and_named(tmp_path, directories, kind, file):
    import shutil

    copy = shutil.copytree(directories[kind], tmp_path / kind)
    weights = {name: weight for name, weight in load_file(copy / file).items() if "score" not in name}
    save_file(weights, copy / file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"score\.weight"):
        SegmentRewardModel.from_pretrained(copy)


def test_any_other_missing_weight_is_refused_even_with_a_new_head(tmp_path, build_scorer_config):
    LlamaForSequenceClassification(build_scorer_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight are missing"):
        load_classifier(tmp_path, new_head=True)


def test_a_new_head_is_small_seeded_and_has_no_bias(tiny_dir):
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        heads.append(load_classifier(tiny_dir, new_head=True).score)
    assert heads[0].bias is None and heads[0].weight.shape == (1, 96)
    assert torch.equal(heads[0].weight, heads[1].weight) and not torch.equal(heads[0].weight, heads[2].weight)
    assert 0.7 / 97 < heads[0].weight.std().item() < 1.3 / 97
    with pytest.raises(ValueError, match=r"score\.weight are missing"):
        load_classifier(tiny_dir)


def test_b32_an_existing_reward_model_keeps_its_head(directories):
    path = directories["full"]
    stored = load_file(path / "model.safetensors")["score.weight"]
    assert torch.equal(load_classifier(path, new_head=True).score.weight, stored)


def test_an_encoder_is_refused_with_the_reason(tmp_path):
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertForSequenceClassification.*needs a causal model.*not an encoder"):
        load_classifier(tmp_path, new_head=True)


def test_nothing_there_is_named(tmp_path):
    for look in (load_classifier, config_of):
        with pytest.raises(ValueError, match=r"no model at .*none"):
            look(str(tmp_path / "none"))


def test_older_readers_find_rotary_base_and_tokenizer_class(tmp_path):
    write_json(tmp_path / "config.json", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", "eos_token": "x"})
    write_for_older_readers(tmp_path)
    assert read_json(tmp_path / "config.json")["rope_theta"] == 5e5
    tokenizer = read_json(tmp_path / "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast" and tokenizer["eos_token"] == "x"
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    write_for_older_readers(tmp_path / "empty")


def test_a_directory_holds_what_the_contract_names(directories):
    for kind, path in directories.items():
        weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
        for name in (weights, "segrew.json", "run.json", "metrics.jsonl", "README.md", "tokenizer.json"):
            assert (path / name).exists(), (kind, name)
        assert f"reward model on {read_json(path / 'segrew.json')['base_model']}" in (path / "README.md").read_text()
