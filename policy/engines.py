"""Which engine draws the answers, as a setting."""

from dataclasses import dataclass
from typing import Literal

import torch

from policy.rollout import TransformersEngine
from policy.sampling import GenerationEngine
from policy.vllm_engine import VllmEngine, check_installed
from segrew.chat import ChatFormat
from segrew.config import arg


@dataclass
class EngineSettings:
    """The engine that draws answers."""

    generation_engine: Literal["transformers", "vllm"] = arg(
        "transformers", help="What draws answers; vllm needs segrew[vllm] and gets the policy's weights anew each time."
    )
    vllm_gpu_memory_utilization: float = arg(
        0.3, help="Share of the device's memory that --generation_engine vllm takes for weights and KV cache."
    )

    def __post_init__(self) -> None:
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise ValueError(
                f"--vllm_gpu_memory_utilization {self.vllm_gpu_memory_utilization}: a share above 0, at most 1."
            )
        if self.generation_engine == "vllm":
            check_installed()

    def engine(
        self, chat: ChatFormat, *, dtype: torch.dtype | None = None, max_model_len: int | None = None
    ) -> GenerationEngine:
        """Return the engine; the arguments are for one with weights of its own.

        Args:
            dtype: that it computes in; default the model's.
            max_model_len: most tokens of a prompt with its answer.
        """
        if self.generation_engine == "transformers":
            return TransformersEngine(chat)
        return VllmEngine(chat, memory=self.vllm_gpu_memory_utilization, dtype=dtype, max_model_len=max_model_len)
