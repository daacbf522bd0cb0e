"""What tests of all floors share: a byte tokenizer, a tiny language model, a tiny reward model, and no network."""

import gc
import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is first imported

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from reward_models.segment_reward_model import SegmentRewardModel
from reward_models.train import train_reward_model
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments
from segrew.config import parse
from segrew.data_options import DataOptions
from segrew.preferences import everyday_pairs
from segrew.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
torch.set_num_threads(1)
# Tolerances are float32's, on processors with bfloat16 units too; tests of bfloat16 ask for it.
torch.cpu._is_avx512_bf16_supported = lambda: False
# transformers' own defaults (eval_delay: float = 0) break its annotations, so this class goes unchecked.
RewardTrainingArguments.__init__ = inspect.unwrap(RewardTrainingArguments.__init__)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Path:
    """A cache of the session's own, so that no entry of an earlier run is read."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEGREW_CACHE", str(path))
        yield path


@pytest.fixture(scope="session")
def launch() -> Callable:
    """Run a program on two processes, which without a GPU meet over gloo on the CPU."""

    def run(directory: Path, *program: str | Path, config: str = "multi_gpu", **flags) -> subprocess.CompletedProcess:
        start = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        start += ["--config_file", ROOT / "configs" / "accelerate" / f"{config}.yaml"]
        start += [word for name, value in flags.items() for word in (f"--{name}", value)]
        return subprocess.run(
            [str(word) for word in (*start, "--main_process_port", "0", *program)],
            capture_output=True, text=True, timeout=300, cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return run


def byte_tokenizer(merges: tuple = (), *, adds_bos: bool = False, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """<pad> 0, <s> 1, </s> 2, then the 256 byte symbols in sorted order, and a token for each merge."""
    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)


@pytest.fixture(scope="session")
def build_byte_tokenizer() -> Callable:
    return byte_tokenizer


def scorer_config(**changes) -> LlamaConfig:
    """A Llama of vocabulary 300 and width 16."""
    settings = {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_labels": 1,
    }
    return LlamaConfig(**settings | changes)


@pytest.fixture(scope="session")
def build_scorer_config() -> Callable:
    return scorer_config


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """The tiny model with random weights, steep enough that its entropies differ."""
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"), steps=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def parser_dir(tmp_path_factory) -> Path:
    """A spaCy pipeline whose parse is made up: four words, less at the end, each depending on the one before."""
    spacy = pytest.importorskip("spacy")

    @spacy.Language.component("chains_of_four")
    def chains_of_four(document):
        for word in document:
            word.head, word.dep_ = (document[word.i - 1], "dep") if word.i % 4 else (word, "ROOT")
        return document

    pipeline = spacy.blank("en")
    pipeline.add_pipe("chains_of_four")
    path = tmp_path_factory.mktemp("parser")
    pipeline.to_disk(path)
    return path


def write_pairs(path: Path, pairs) -> Path:
    """Write preference pairs as a file of TRL's conversational prompt, plain answers and marked faults."""
    rows = [
        {name: getattr(pair, name) for name in ("id", "prompt", "chosen", "rejected")}
        | {"faults": [vars(fault) for fault in pair.faults]}
        for pair in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def short_pairs():
    """The twelve embedded training pairs of the fewest characters."""
    return sorted(everyday_pairs("train"), key=lambda pair: len(pair.chosen + pair.rejected))[:12]


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory, short_pairs) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", short_pairs)


@pytest.fixture(scope="session")
def train(tiny_dir, pairs_file) -> Callable:
    """Train a reward model on the tiny model and the short pairs; flags as on the command line."""
    gc.collect()
    gc.freeze()  # the Trainer collects garbage at its end, and would search every library each time

    def run(output_dir: Path, **flags) -> SegmentRewardModel:
        settings = {"model_name_or_path": tiny_dir, "dataset_name": pairs_file, "output_dir": output_dir}
        settings |= {"disable_tqdm": True, "save_strategy": "no", "bf16": False, "per_device_train_batch_size": 4}
        settings |= flags
        argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        config, args, options = parse("train-rm", (RewardModelConfig, RewardTrainingArguments, DataOptions), argv)
        return train_reward_model(config, args, Console(file=io.StringIO()), options)

    return run


@pytest.fixture(scope="session")
def head_dir(tmp_path_factory, train) -> Path:
    """A reward model of rule entropy whose head was fitted on the frozen tiny trunk."""
    path = tmp_path_factory.mktemp("head") / "run"
    train(path, tune="head")
    return path


# -- tiny models of many families, their weights random ---------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, a sliding layer": ("Qwen3", {"head_dim": 8, "use_sliding_window": True} | KINDS),
    "mistral": ("Mistral", {}),
    "mistral, a short window": ("Mistral", {"sliding_window": 4}),
    "phi3": ("Phi3", {}),
    "phi3, a short window": ("Phi3", {"sliding_window": 3}),
    "gemma2": ("Gemma2", GEMMA | KINDS | {"attn_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma3, a short window": ("Gemma3Text", GEMMA | KINDS),
    "gpt2": (
        "GPT2",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "jetmoe": ("JetMoe", {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 2}),
    "qwen2 moe": ("Qwen2Moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
    "phi3, longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.0],
                "long_factor": [1.0, 9.0],
            },
        },
    ),
    # Their windows are in their masks alone, or they have sinks or learned masks: such rows are padded.
    "doge": ("Doge", {"head_dim": 4}),
    # Their heads have a layer of their own.
    "modernbert decoder": ("ModernBertDecoder", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 64}),
    "megatron bert": ("MegatronBert", {"is_decoder": True}),
    "phimoe, a short window": ("Phimoe", {"sliding_window": 4, "num_local_experts": 2}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1} | KINDS),
}


# FlexAttention's kernels take heads of at least 16 numbers.
WIDER = {"hidden_size": 64, "head_dim": 16, "n_embd": 64, "query_pre_attn_scalar": 16}


def build(name: str, *, wider: bool = False) -> torch.nn.Module:
    """A causal model in evaluation mode."""
    family, changes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes | (WIDER if wider else {}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # past the initial scale, where all architectures agree on next to nothing
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


@pytest.fixture(scope="session")
def build_family() -> Callable:
    return build


@pytest.fixture(scope="session")
def small_sizes() -> dict:
    return SIZES
