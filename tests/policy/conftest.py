"""A policy and reward models of a few thousand weights, made on the spot, and a stand-in for a judge's endpoint."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from policy.ppo_config import PPOConfig
from reward_models import LocationNormalizer, SegmentRewardModel
from reward_models.card import RewardModelCard
from segrew.chat import ChatFormat
from segrew.chat_templates import NAMED_TEMPLATES
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint
from segrew.segmentation import SegmentationConfig

PROMPTS = ["Name a colour.", "Say hi.", "What is two and two?", "Name a river in Europe.", "Why is the sky blue?"]


def byte_tokenizer(swapped: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Special tokens, then the 256 byte symbols; `swapped` exchanges the ids of two of them."""
    symbols = ["<pad>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    if swapped:
        a, b = swapped
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = NAMED_TEMPLATES["chatml"]
    return fast


def tiny_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "attention_dropout": 0.1,
    }
    return LlamaConfig(**settings | changes)


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory) -> Path:
    """A random Llama whose logits are steep enough for entropies to differ, and which does stop now and then."""
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        model.lm_head.weight[2] *= 2
    model.generation_config.update(top_k=3, repetition_penalty=1.5, do_sample=True, min_new_tokens=4)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def make_reward_model(path: Path, policy: Path, rule: SegmentationConfig, *, calibrated: bool = True) -> Path:
    """A reward model with random weights on the policy's tokenizer."""
    torch.manual_seed(2)
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(policy)))
    model = LlamaForSequenceClassification(tiny_config(num_labels=1))
    card = RewardModelCard(
        segmentation=rule,
        base_model=str(policy),
        segmenter_fingerprint=model_fingerprint(load_causal_lm(str(policy), dtype=torch.float32)),
        tokenizer_fingerprint=chat.fingerprint,
        max_length=512,
    )
    normalizer = None
    if calibrated:
        normalizer = LocationNormalizer.from_parameters(
            0.1, 0.02, 0.0, 0.1, fingerprint=card.fingerprint, rule=rule.label
        )
    SegmentRewardModel(model, chat, card, normalizer).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reward_dirs(tmp_path_factory, policy_dir) -> dict[str, Path]:
    """One reward model for each rule that a test asks for."""
    rules = {
        "entropy": SegmentationConfig(rule="entropy", threshold=5.2),
        "response": SegmentationConfig(rule="response"),
        "token": SegmentationConfig(rule="token"),
        "released": SegmentationConfig(threshold=5.2, compat="dense_rlhf_release"),
        "sentence": SegmentationConfig(rule="sentence"),
    }
    return {
        name: make_reward_model(tmp_path_factory.mktemp(f"reward_{name}"), policy_dir, rule)
        for name, rule in rules.items()
    }


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture(scope="session")
def build_tokenizer():
    return byte_tokenizer


@pytest.fixture(scope="session")
def build_reward_model():
    return make_reward_model


@pytest.fixture(scope="session")
def build_tiny_config():
    return tiny_config


@pytest.fixture
def settings(policy_dir, reward_dirs, prompts_file, tmp_path):
    """Build a config from the tiny defaults."""

    def build(reward: str = "entropy", **changes) -> PPOConfig:
        defaults = {
            "model_name_or_path": str(policy_dir),
            "reward_model_path": str(reward_dirs[reward]),
            "dataset_name": str(prompts_file),
            "output_dir": str(tmp_path / "run"),
            "total_steps": 2,
            "rollout_batch_size": 6,
            "max_new_tokens": 10,
            "max_prompt_length": 128,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "save_steps": 0,
        }
        return PPOConfig(**defaults | changes)

    return build


class StandIn(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint on this machine that replies with what `answer` says.

    Args:
        answer: from the request's JSON to a text, or to (status, body) with optional headers.
    """

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.requests, self.headers, self.lock = answer, [], [], threading.Lock()
        self.together = self.most_together = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.headers.append(dict(self.headers) | {"path": self.path})
            server.together += 1
            server.most_together = max(server.most_together, server.together)
        said = server.answer(body)
        with server.lock:
            server.together -= 1
        status, content, *headers = (200, chat_completion(said)) if isinstance(said, str) else said
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_):
        pass


def chat_completion(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def stand_in(monkeypatch):
    """Start an endpoint with the given way to answer; nothing waits between two tries."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    waits = []
    monkeypatch.setattr("policy.chat_endpoint.sleep", waits.append)
    servers = []

    def start(answer):
        server = StandIn(answer)
        server.waits = waits
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
