"""One contract for whatever draws answers: transformers, a stand-in for vLLM with its names, and vLLM where it is.

The stand-in takes only what vLLM 0.33 takes (`LLM`, `SamplingParams`, `collective_rpc("reload_weights")`,
`reset_prefix_cache`) and starts, as `load_format="dummy"` does, with weights that are nobody's.
"""

import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
import warnings
from typing import ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MixtralConfig

from policy.engines import EngineSettings
from policy.ppo import train_policy
from policy.ppo_report import engine_warning
from policy.rollout import Answers, TransformersEngine, sample_answers
from policy.sampling import Sampling
from policy.vllm_engine import VllmEngine, checkpoint_weights
from segrew import processes
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, response_statistics
from segrew.language_models import load_causal_lm

REAL = importlib.util.find_spec("vllm") is not None
ENGINES = [
    "transformers",
    "stand-in",
    pytest.param("vllm", marks=pytest.mark.skipif(not REAL, reason="vLLM is not installed")),
]


@dataclasses.dataclass
class StandInParams:
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: list | None = None
    ignore_eos: bool = False
    stop: list | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        assert not (self.stop and not self.detokenize)  # as vLLM refuses it


class StandIn:
    """Keeps to vLLM's contract: no request meets keys and values of weights that have been replaced."""

    made: ClassVar[list] = []

    def __init__(self, model, *, load_format, dtype, max_model_len, gpu_memory_utilization,
                 distributed_executor_backend, generation_config, logprobs_mode):  # fmt: skip
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
        assert (load_format, distributed_executor_backend) == ("dummy", "external_launcher")
        assert (generation_config, logprobs_mode) == ("vllm", "processed_logprobs")
        torch.manual_seed(123)
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.tokenizer, self.max_model_len, self.stale = AutoTokenizer.from_pretrained(model), max_model_len, False
        self.requests, self.known = [], {}
        StandIn.made.append(self)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights" and set(kwargs) == {"weights_iterator"}
        weights = dict(kwargs["weights_iterator"])
        assert {weight.dtype for weight in weights.values()} == {self.model.dtype}
        self.model.load_state_dict({name: weight.clone() for name, weight in weights.items()})
        self.stale, self.known = True, {}

    def reset_prefix_cache(self):
        self.stale = False
        return True

    @torch.no_grad()
    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert not self.stale and len(prompts) == len(sampling_params) and not torch.is_autocast_enabled("cpu")
        self.requests.append(list(zip(prompts, sampling_params, strict=True)))
        return [
            types.SimpleNamespace(outputs=[self._answer(prompt["prompt_token_ids"], p, k) for k in range(p.n)])
            for prompt, p in zip(prompts, sampling_params, strict=True)
        ]

    def _answer(self, prompt, p, k):
        assert len(prompt) + p.max_tokens <= (self.max_model_len or 10**9)
        draw, ids, told = torch.Generator().manual_seed(p.seed + k), [], []
        while len(ids) < p.max_tokens and not (ids and ids[-1] in p.stop_token_ids):
            row = (*prompt, *ids)
            if row not in self.known:
                self.known[row] = self.model(torch.tensor([row])).logits[0, -1].float()
            logprobs = (self.known[row] / (p.temperature or 1.0)).log_softmax(-1)
            new = logprobs.argmax() if p.temperature == 0 else torch.multinomial(logprobs.exp(), 1, generator=draw)[0]
            ids.append(int(new))
            told.append({ids[-1]: types.SimpleNamespace(logprob=float(logprobs[new]))})
            if any(string in self.tokenizer.decode(ids) for string in p.stop or ()):
                break
        return types.SimpleNamespace(token_ids=tuple(ids), logprobs=None if p.logprobs is None else told)


@pytest.fixture(scope="module")
def model(build_tiny_config):
    """With heads of 32 numbers, the fewest that vLLM serves, and generation settings that must have no say."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(build_tiny_config(hidden_size=64))
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
        model.lm_head.weight[2] *= 2
    model.generation_config.update(top_k=3, repetition_penalty=1.5, do_sample=True, min_new_tokens=4)
    return model.eval()


@pytest.fixture(scope="module")
def chat(build_tokenizer):
    return ChatFormat.from_tokenizer(build_tokenizer())


@pytest.fixture
def stand_in_module(monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = StandIn, StandInParams
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(StandIn, "made", [])


@pytest.fixture(scope="module")
def real_engine(chat):
    """One for all tests: starting vLLM takes seconds."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return VllmEngine(chat, memory=0.1, max_model_len=256)


@pytest.fixture(params=ENGINES)
def engine(request, chat):
    if request.param == "transformers":
        return TransformersEngine(chat)
    if request.param == "vllm":
        return request.getfixturevalue("real_engine")
    request.getfixturevalue("stand_in_module")
    return VllmEngine(chat, memory=0.3, max_model_len=256)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ask(chat, *texts):
    return [chat.prompt_ids([{"role": "user", "content": text}]) for text in texts]


def moved(model, by: float = 0.3):
    """The same model somewhere else."""
    other = AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * weight.std() * torch.randn_like(weight))
    return other.eval()


def test_answers_come_in_order_and_end_at_the_stop_tokens(engine, model, chat):
    prompts = ask(chat, *(["x" * k for k in (30, 1, 9)] * 12))
    stop = chat.prompt_ids([{"role": "user", "content": "e"}])[-3]
    sampling = Sampling(max_new_tokens=9, batch_size=5, stop_token_ids=(stop,))
    answers = sample_answers(model, chat, prompts, sampling, generator(1), engine=engine)
    assert answers.conversations.prompts == prompts
    ended = answers.conversations.ended.tolist()
    assert set(ended) == {True, False}
    for ids, stopped, text, told in zip(
        answers.conversations.responses, ended, answers.texts, answers.logprobs, strict=True
    ):
        assert (ids[-1] in (chat.stop_id, stop)) == stopped and not {chat.stop_id, stop} & set(ids[:-1])
        assert stopped or len(ids) == 9
        assert text == chat.decode(ids)
        assert told is None or len(told) == len(ids)


def test_first_tokens_have_the_model_s_frequencies_at_the_temperature(engine, model, chat):
    (prompt,) = ask(chat, "Say hi.")
    sampling = Sampling(max_new_tokens=1, temperature=0.5, batch_size=120)
    answers = sample_answers(model, chat, [prompt] * 120, sampling, generator(2), engine=engine)
    counts = torch.bincount(torch.tensor([row[0] for row in answers.conversations.responses]), minlength=259)
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
    top = expected.topk(5).indices
    spread = (120 * expected[top] * (1 - expected[top])).sqrt()
    assert ((counts[top] - 120 * expected[top]).abs() < 4.5 * spread).all()
    assert (counts > 0).sum() > 8


def test_it_draws_from_the_model_as_it_is_now(engine, model, chat):
    prompts, other = ask(chat, "a", "bc", "def"), moved(model)
    sampling = Sampling(max_new_tokens=6, greedy=True)
    for now in (model, other, model):
        answers = sample_answers(now, chat, prompts, sampling, generator(), engine=engine)
        for prompt, ids in zip(prompts, answers.conversations.responses, strict=True):
            for j, token in enumerate(ids):
                with torch.no_grad():
                    assert token == int(now(torch.tensor([prompt + ids[:j]])).logits[0, -1].argmax())
    with torch.no_grad():
        other.lm_head.weight.neg_()  # in place, as an optimizer moves it
    answers = sample_answers(other, chat, prompts, sampling, generator(), engine=engine)
    with torch.no_grad():
        firsts = [int(other(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    assert [ids[0] for ids in answers.conversations.responses] == firsts


def test_one_generator_decides_and_torch_s_own_state_stays(engine, model, chat):
    prompts, sampling = ask(chat, "a", "bb", "bb", "bb"), Sampling(max_new_tokens=8)
    drawn = []
    for seed in (5, 5, 6):
        source = generator(seed)
        engine.sync_weights(model)
        state = torch.get_rng_state()
        with torch.no_grad():
            drawn.append([one.ids for one in engine.generate(prompts, sampling, source)])
        assert torch.equal(torch.get_rng_state(), state)
        expected = generator(seed)
        torch.randint(2**62, (), generator=expected)
        assert torch.equal(source.get_state(), expected.get_state())
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(ids) for ids in drawn[0][1:]}) == 3  # samples of one prompt differ


def test_a_stop_string_ends_an_answer(engine, model, chat):
    prompts = ask(chat, "go") * 16
    plain = sample_answers(model, chat, prompts, Sampling(max_new_tokens=10), generator(4), engine=engine)
    stop = next(text[2] for text in plain.texts if len(text) > 4 and text[2] not in text[:2] and text[2].isascii())
    sampling = Sampling(max_new_tokens=10, stop_strings=(stop,))
    answers = sample_answers(model, chat, prompts, sampling, generator(4), engine=engine)
    hits = 0
    for ids, text, ended, told in zip(
        answers.conversations.responses, answers.texts, answers.conversations.ended.tolist(), answers.logprobs,
        strict=True,
    ):  # fmt: skip
        assert stop not in text and (told is None or len(told) == len(ids))
        if stop in chat.decode(ids):
            hits += 1
            assert ended and stop not in chat.decode(ids[:-1])
    assert hits


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_an_engine_says_of_its_tokens_is_what_our_own_pass_says(engine, model, chat, temperature):
    prompts, sampling = ask(chat, "one", "two", "two"), Sampling(max_new_tokens=7, temperature=temperature)
    answers = sample_answers(model, chat, prompts, sampling, generator(7), engine=engine)
    with torch.no_grad():
        ours, _ = response_statistics(model, answers.conversations, temperature=temperature)
        others, _ = response_statistics(moved(model, 1.0), answers.conversations, temperature=temperature)
    gap = answers.logprob_gap(ours)
    if isinstance(engine, TransformersEngine):
        assert gap is None
    else:
        assert gap.max() < 1e-4 and answers.logprob_gap(others).max() > 0.1
    filtered = dataclasses.replace(sampling, top_k=5)  # of another distribution than ours: nothing to compare
    assert sample_answers(model, chat, prompts, filtered, generator(7), engine=engine).logprob_gap(ours) is None


def test_the_gap_is_of_real_tokens_and_joins_over_processes():
    rows = Conversations([[1], [1]], [[5, 6, 7], [8]], torch.tensor([False, False]))
    answers = Answers(rows, ["", ""], [[-1.0, -2.0, -3.0], [-4.0]])
    gap = answers.logprob_gap(torch.tensor([[-1.0, -2.5, -2.0], [-4.5, 99.0, 99.0]]))
    assert gap.tolist() == [[0.0, 0.5, 1.0], [0.5, 0.0, 0.0]]
    assert processes.joined_rows([gap, gap[1:, :1]]).tolist() == [[0.0, 0.5, 1.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert Answers(rows, ["", ""], [[-1.0, -2.0, -3.0], None]).logprob_gap(torch.zeros(2, 3)) is None


# -- what is given to vLLM ---------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_are_one_request_and_settings_are_passed_on(stand_in_module, model, chat):
    engine, (a, b) = VllmEngine(chat, memory=0.3), ask(chat, "a", "b")
    sampling = Sampling(max_new_tokens=2, temperature=0.8, top_k=7, top_p=0.9, stop_token_ids=(77,))
    sample_answers(model, chat, [a, a, a, b, a], sampling, generator(), engine=engine)
    (requests,) = StandIn.made[0].requests
    assert [(r["prompt_token_ids"], p.n) for r, p in requests] == [(a, 3), (b, 1), (a, 1)]
    assert len({p.seed for _, p in requests}) == 3
    params = requests[0][1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.8, 7, 0.9, 2)
    assert params.ignore_eos and params.stop_token_ids == [chat.stop_id, 77]
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ  # what was set for the start is gone


def test_adapters_are_added_to_what_is_sent_and_the_model_stays_as_it_is(policy_dir, chat, stand_in_module):
    from peft import LoraConfig, get_peft_model

    plain = load_causal_lm(str(policy_dir), dtype=torch.float32, device=torch.device("cpu"))
    adapted = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    before = {name: weight.clone() for name, weight in adapted.named_parameters()}
    engine = VllmEngine(chat, memory=0.3)
    engine.sync_weights(adapted)
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.named_parameters())
    ids = torch.tensor(ask(chat, "hello"))
    with torch.no_grad():
        expected, found = adapted(ids).logits, StandIn.made[0].model(ids).logits
        assert (adapted(ids).logits - plain.base_model(ids).last_hidden_state @ plain.lm_head.weight.T).abs().max() < 1
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 0.1
            engine.sync_weights(adapted)
            torch.testing.assert_close(StandIn.made[0].model(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-5)


def test_weights_go_by_the_names_of_checkpoints(tmp_path, build_tiny_config):
    from safetensors.torch import load_file

    sizes = {k: v for k, v in build_tiny_config().to_dict().items() if k in MixtralConfig().to_dict()}
    config = MixtralConfig(**sizes | {"num_local_experts": 3, "architectures": None, "model_type": "mixtral"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    sent, saved = dict(checkpoint_weights(model)), load_file(tmp_path / "model.safetensors")
    assert set(sent) == set(saved) != {name for name, _ in model.named_parameters()}
    assert all(torch.equal(weight, saved[name]) for name, weight in sent.items())


# -- settings and a whole run ------------------------------------------------------------------------------------------


@pytest.mark.skipif(REAL, reason="vLLM is installed")
def test_a_missing_extra_is_named_with_what_to_do(settings):
    for build in (EngineSettings, settings):
        with pytest.raises(ValueError, match=r"--generation_engine vllm: .*pip install 'segrew\[vllm\]'"):
            build(generation_engine="vllm")
    with pytest.raises(ValueError, match=r"--vllm_gpu_memory_utilization 1\.5"):
        EngineSettings(vllm_gpu_memory_utilization=1.5)


def run_with(config) -> list[dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = train_policy(config)
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_ppo_draws_with_the_engine_and_notes_the_gap(settings, stand_in_module):
    changes = {"rollout_batch_size": 4, "num_samples_per_prompt": 2, "use_peft": True, "learning_rate": 1e-2}
    lines = run_with(settings(generation_engine="vllm", bf16=False, total_steps=2, **changes))
    (llm,) = StandIn.made
    assert [sum(p.n for _, p in asked) for asked in llm.requests] == [4, 4] and llm.max_model_len == 128 + 10
    assert all(line["rollout/logprob_gap"] < 1e-4 for line in lines)


def test_an_engine_that_keeps_old_weights_is_noticed(settings, stand_in_module, monkeypatch):
    monkeypatch.setattr(StandIn, "collective_rpc", lambda self, *_, **__: None)
    with pytest.warns(UserWarning, match="nats a token off the policy's own"):
        train_policy(settings(generation_engine="vllm", bf16=False, total_steps=1))
    assert engine_warning({"rollout/logprob_gap": 0.05}) is None and engine_warning({}) is None
