"""Answers from vLLM, an inference engine in this process with a copy of the policy's weights (2309.06180)."""

import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from policy.sampling import Drawn, Sampling
from segrew.chat import ChatFormat
from segrew.language_models import plain_model


def check_installed() -> None:
    """Refuse to go on without vLLM.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--generation_engine vllm: the package vllm is not installed. pip install 'segrew[vllm]' (in a fresh "
            "environment, as it pins torch and transformers), or leave the option out to draw with transformers."
        )


class VllmEngine:
    """Draws answers with vLLM; its weights are those of the last `sync_weights`.

    The engine lives in this process and on this process's device: under `accelerate launch` each process has one.

    Args:
        dtype: that it computes in; default the model's own.
        memory: the share of the device's memory that it takes for weights and KV cache.
        max_model_len: most tokens of a prompt with its answer; default the model's context.
    """

    def __init__(
        self, chat: ChatFormat, *, memory: float, dtype: torch.dtype | None = None, max_model_len: int | None = None
    ):
        self.chat, self.memory, self.dtype, self.max_model_len = chat, memory, dtype, max_model_len
        self._llm: Any = None
        self._device = torch.device("cpu")

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> None:
        """Copy every weight into the engine, which starts up the first time, and forget what it has cached."""
        inner = plain_model(model)
        dtype, self._device = self.dtype or inner.dtype, inner.device
        with self._apart():
            if self._llm is None:
                self._llm = self._start(inner, dtype)
            weights = ((name, weight.to(dtype)) for name, weight in checkpoint_weights(inner))
            # Through the worker's loader, which repacks what vLLM keeps in a layout of its own.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self._llm.reset_prefix_cache()  # it holds keys and values of the weights before

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """The engine chooses its own precision, and torch's random state stays as it was."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.autocast(self._device.type, enabled=False):
            yield

    def _start(self, inner: Any, dtype: torch.dtype) -> Any:
        from vllm import LLM

        # It reads the model's shape and tokenizer from a directory; the weights come by `sync_weights`.
        with tempfile.TemporaryDirectory() as directory, _launched():
            inner.config.save_pretrained(directory)
            self.chat.tokenizer.save_pretrained(directory)
            return LLM(
                model=directory,
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=self.max_model_len,
                gpu_memory_utilization=self.memory,
                distributed_executor_backend="external_launcher",  # in this process, one engine to each
                generation_config="vllm",  # no settings but ours
                logprobs_mode="processed_logprobs",  # at the temperature of sampling
            )

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator, description: str = ""
    ) -> list[Drawn]:
        """Draw one answer to each prompt; see `GenerationEngine`."""
        from vllm import SamplingParams

        seeds = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        together = [(prompt, len(list(rows))) for prompt, rows in groupby(prompts)]
        params = [
            SamplingParams(
                n=n,
                seed=int(torch.randint(2**62, (), generator=seeds)),
                temperature=0.0 if sampling.greedy else sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_ids(self.chat)),
                ignore_eos=True,  # the stop tokens are ours alone
                stop=list(sampling.stop_strings) or None,
                detokenize=bool(sampling.stop_strings),
                include_stop_str_in_output=True,
                logprobs=None if sampling.greedy or sampling.warning else 0,
            )
            for _, n in together
        ]
        requests = [{"prompt_token_ids": prompt} for prompt, _ in together]
        with self._apart():
            outputs = self._llm.generate(requests, params, use_tqdm=bool(description))
        return [_drawn(answer) for output in outputs for answer in output.outputs]


def _drawn(answer: Any) -> Drawn:
    ids = list(answer.token_ids)
    if answer.logprobs is None:
        return Drawn(ids)
    return Drawn(ids, [step[token].logprob for token, step in zip(ids, answer.logprobs, strict=True)])


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a transformers model's weights under the names that its checkpoints have.

    Active LoRA adapters are added to copies of their weights, one at a time: the model stays as it is, without the
    rounding that merging and taking apart again would leave in it.
    """
    weights = _plain_weights(model)
    if not getattr(model, "_weight_conversions", None):
        return weights
    from transformers.core_model_loading import revert_weight_conversion

    return iter(revert_weight_conversion(model, dict(weights)).items())


def _plain_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, weight in model.named_parameters():
        owner = next((owner for owner in _owners(name) if owner in adapted), None)
        if owner is None:
            yield name, weight.detach()
            continue
        within = name.removeprefix(f"{owner}.")
        if not within.startswith("base_layer."):
            continue  # the adapter's own
        layer, leaf = adapted[owner], within.removeprefix("base_layer.")
        merged = weight.detach()
        if leaf == "weight" and not (layer.merged or layer.disable_adapters):
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                    merged = merged + layer.get_delta_weight(adapter)
        yield f"{owner}.{leaf}", merged


def _owners(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1))


@contextmanager
def _launched() -> Iterator[None]:
    """Stand in for a launcher where there is none: the environment that an engine in this process looks for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    missing = {name: value for name, value in alone.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name)
