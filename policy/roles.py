"""The models of a PPO run: policy, frozen reference, critic, reward model, and who cuts the segments."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policy.backbone import hold_once, learning, load_start, trunk_to_learn, view_of, with_adapter
from policy.ppo_config import PPOConfig
from policy.rollout import in_micro_batches
from reward_models import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.conversations import (
    Conversations,
    response_states,
    response_statistics,
    statistics_of_states,
)
from segrew.language_models import load_causal_lm, load_tokenizer, model_fingerprint, trunk_of


class TokenPolicy(nn.Module):
    """A causal model as a module from conversations to log-probabilities, so that wrappers see its forward."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, conversations: Conversations, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each response token, and entropy of what produced it: each [b t]."""
        return response_statistics(self.model, conversations, temperature=temperature)


class Critic(nn.Module):
    """A trunk of its own with a linear head that values the state before each response token."""

    def __init__(self, trunk: nn.Module):
        super().__init__()
        self.trunk = trunk
        width = trunk_of(trunk).config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        self.head = nn.Linear(width, 1)
        nn.init.normal_(self.head.weight, std=1.0 / (width + 1))
        nn.init.zeros_(self.head.bias)

    def forward(self, conversations: Conversations) -> Float[Tensor, "b t"]:
        """V of the state that produced each response token; 0 in padding."""
        states = response_states(self.trunk, conversations)
        return states.spread(self._value(states.before))

    def with_after(self, conversations: Conversations) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b 1"]]:
        """The same, and V of the state after each response's last token, from one pass."""
        states = response_states(self.trunk, conversations)
        before, after = states.spread(self._value(states.before)), states.spread(self._value(states.at))
        return before, after.gather(1, states.mask.sum(1, keepdim=True).sub(1).clamp(min=0))

    def _value(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.float()).squeeze(-1)


@dataclass(frozen=True)
class ReferencePass:
    """What one pass of the reference says of answers; 0 in padding.

    Args:
        logprobs: at each of the temperatures that were asked for. entropy: at temperature 1, in nats.
        outputs: by source, what reward heads on its states say after every token.
    """

    logprobs: list[Float[Tensor, "b t"]]
    entropy: Float[Tensor, "b t"]
    outputs: dict[str, Float[Tensor, "b t k"]]


@dataclass
class Roles:
    """Every model of a run. With LoRA all of them are views of one base, see `policy/backbone.py`.

    Args:
        policy: trains. reference: its start, frozen.
        critic: trains; None where advantages need no values.
        reward_model: the first one; None where only functions reward.
        segmenter: the model whose entropies cut the reward model's segments; None where that is the reference.
        fingerprint: identity of the reference.
        readers: reward models whose trunk is the reference, by source: their heads read its states.
    """

    policy: TokenPolicy
    reference: nn.Module
    critic: Critic | None
    reward_model: SegmentRewardModel | None
    segmenter: nn.Module | None
    chat: ChatFormat
    fingerprint: str
    readers: dict[str, SegmentRewardModel] = field(default_factory=dict)

    @property
    def cut_by(self) -> str:
        """Identity of the model whose entropies cut: the first reward model's segmenter, else the reference."""
        return (self.reward_model and self.reward_model.segmenter_fingerprint) or self.fingerprint

    def models(self) -> dict[str, nn.Module]:
        """Every model but the reward models, by its role."""
        models = {
            "reference": self.reference, "policy": self.policy, "critic": self.critic, "segmenter": self.segmenter
        }  # fmt: skip
        return {role: model for role, model in models.items() if model is not None}

    def read_along(self, name: str, model: SegmentRewardModel) -> None:
        """Let a reward model whose trunk is the reference read its rewards in the reference's own pass."""
        if model.card.trunk_is_segmenter and model.segmenter_fingerprint == self.fingerprint:
            self.readers[name] = model

    @torch.no_grad()
    def reference_pass(
        self, conversations: Conversations, *, temperatures: list[float], max_tokens: int
    ) -> ReferencePass:
        """Run the reference once.

        Args:
            temperatures: of the log-probabilities.
        """
        model = self.reference

        def compute(part: Conversations) -> tuple[Tensor, ...]:
            states = response_states(model, part)
            said = [statistics_of_states(model, states.before, part, temperature=t) for t in temperatures]
            outputs = (reader.outputs_of(states.at, states.mask) for reader in self.readers.values())
            return *(logprobs for logprobs, _ in said), said[0][1], *outputs

        found = list(in_micro_batches(compute, conversations, max_tokens))
        logprobs, (entropy, *outputs) = found[: len(temperatures)], found[len(temperatures) :]
        return ReferencePass(logprobs, entropy, dict(zip(self.readers, outputs, strict=True)))

    @torch.no_grad()
    def segmenter_statistics(
        self, conversations: Conversations, *, max_tokens: int
    ) -> tuple[Float[Tensor, "b t"], ...]:
        """Log-probabilities and entropies, at temperature 1, of a segmenter that is not the reference."""
        segmenter = self.segmenter
        assert segmenter is not None
        return in_micro_batches(lambda part: response_statistics(segmenter, part), conversations, max_tokens)


def load_roles(config: PPOConfig, device: torch.device, checkpoint: Path | None = None) -> Roles:
    """Load every model once, check that they belong together, and freeze what does not train.

    Args:
        checkpoint: where a resumed run takes the policy from; the critic's weights are loaded by the caller.

    Raises:
        ValueError: a model is missing, or the reward model reads other tokens than the policy writes.
    """
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model_name_or_path)
    chat = ChatFormat.from_tokenizer(tokenizer, config.chat_template, config.system_role)
    reward_model = None
    if config.reward_model_path:
        reward_model = SegmentRewardModel.from_pretrained(config.reward_model_path, device=device)
        reward_model.model.requires_grad_(False)
    reads_ids = reward_model is not None and config.reward_tokens == "ids"
    if reward_model is not None and reads_ids:
        check_same_tokens(chat, reward_model, config.reward_model_path, config.model_name_or_path)

    base, reference, fingerprint = load_start(config, device)
    segmenter = None
    if reward_model is not None:
        hold_once(reward_model.model, base)
        # A reward model that names no segmenter leaves the cutting to the reference.
        if reads_ids and reward_model.segmenter_fingerprint not in ("", fingerprint):
            is_base = base is not reference and reward_model.segmenter_fingerprint == model_fingerprint(base)
            segmenter = base if is_base else reward_model.segmenter().requires_grad_(False)
    critic = _critic(config, reference, reward_model).to(device) if config.advantage_estimator == "gae" else None
    policy = _policy(config, base, reference, device, checkpoint)
    for model in filter(None, (policy, critic)):
        disable_dropout(model)
        if config.gradient_checkpointing:
            _checkpoint_gradients(model)
    return Roles(TokenPolicy(policy), reference, critic, reward_model, segmenter, chat, fingerprint)


def _critic(config: PPOConfig, reference: nn.Module, reward_model: SegmentRewardModel | None) -> Critic:
    if config.critic_init == "sft":
        return Critic(trunk_to_learn(reference, config))
    assert reward_model is not None
    critic = Critic(trunk_to_learn(reward_model.model, config))
    critic.head.weight.data.copy_(reward_model.head.weight)
    return critic


def _policy(
    config: PPOConfig, base: nn.Module, reference: nn.Module, device: torch.device, checkpoint: Path | None
) -> nn.Module:
    if config.use_peft:
        if checkpoint is None:
            return learning(view_of(reference), config)
        return with_adapter(base, checkpoint, learns=True)
    if checkpoint is None:
        return copy.deepcopy(reference).requires_grad_(True)
    return load_causal_lm(str(checkpoint), dtype=torch.float32, device=device)


def disable_dropout(model: nn.Module) -> None:
    """Log-probabilities of the same tokens must not differ between two passes."""
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout",):
            if hasattr(module, name):
                setattr(module, name, 0.0)


def _checkpoint_gradients(model: Any) -> None:
    inner: Any = trunk_of(model.trunk if isinstance(model, Critic) else model)
    # Renamed in transformers 5.2x; the old name goes in 6.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def check_same_tokens(chat: ChatFormat, reward_model: SegmentRewardModel, path: str, policy: str) -> None:
    """Refuse a reward model that would read the policy's ids as other tokens, or in another template.

    Args:
        path: of the reward model. policy: name of the policy's model.

    Raises:
        ValueError: naming the first token that differs.
    """
    ours, theirs = chat.tokenizer.get_vocab(), reward_model.chat.tokenizer.get_vocab()
    differing = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
    if differing:
        first = min(differing, key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
        raise ValueError(
            f"the reward model in {path} has another tokenizer than the policy {policy}: token "
            f"{first!r} has id {ours.get(first)} in the policy and {theirs.get(first)} in the reward model "
            f"({len(differing)} tokens differ). Train the reward model from this policy's model, or let it read the "
            "answers' text: --reward_tokens text."
        )
    check_vocabulary(chat, reward_model.model, f"the reward model in {path}")
    if chat.tokenizer.chat_template != reward_model.chat.tokenizer.chat_template:
        raise ValueError(
            f"the reward model in {path} was trained with another chat template than the policy's; pass "
            f"--chat_template {path}/chat_template.jinja to use its own, or --reward_tokens text."
        )


def check_vocabulary(chat: ChatFormat, model: nn.Module, name: str) -> int:
    """Return how many embedding rows a model has, all tokens among them.

    Args:
        name: of the model, in words.

    Raises:
        ValueError: naming a token without one.
    """
    ours = chat.tokenizer.get_vocab()
    rows = trunk_of(model).get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if max(ours.values()) >= rows:
        token = max(ours, key=lambda name: ours[name])
        raise ValueError(
            f"{name} has {rows} embedding rows, too few for the tokenizer's token {token!r} (id {ours[token]}). Train "
            "it from the model that the tokenizer belongs to, or restore that model's own tokenizer."
        )
    return rows
