"""The models of a PPO run: policy, frozen reference, critic, reward model, and who cuts the segments."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policy.ppo_config import PPOConfig
from policy.rollout import in_micro_batches
from reward_models import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import (
    Conversations,
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    response_states,
    response_statistics,
    trunk_of,
)


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
        before = response_states(self.trunk, conversations).before
        return self._value(before).masked_fill(~conversations.mask.to(before.device), 0.0)

    def after(self, conversations: Conversations) -> Float[Tensor, "b 1"]:
        """V of the state after each response's last token."""
        at = response_states(self.trunk, conversations).at
        last = (torch.tensor(conversations.lengths, device=at.device) - 1).clamp(min=0)
        return self._value(at[torch.arange(len(at), device=at.device), last][:, None])

    def _value(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n"]:
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.float()).squeeze(-1)


@dataclass
class Roles:
    """Every model of a run.

    Args:
        policy: trains. reference: frozen copy of its start; None where the policy's adapter can be switched off.
        critic: trains; None where advantages need no values.
        reward_model: the first one; None where only functions reward.
        segmenter: the model whose entropies cut the reward model's segments; None where that is the reference.
    """

    policy: TokenPolicy
    reference: nn.Module | None
    critic: Critic | None
    reward_model: SegmentRewardModel | None
    segmenter: nn.Module | None
    chat: ChatFormat

    @torch.no_grad()
    def reference_statistics(
        self, conversations: Conversations, *, temperature: float, max_tokens: int
    ) -> tuple[Float[Tensor, "b t"], ...]:
        """The reference's log-probabilities, and its entropies at temperature 1, in one pass."""
        model: Any = self.policy.model if self.reference is None else self.reference
        with model.disable_adapter() if self.reference is None else nullcontext():
            return in_micro_batches(
                lambda part: response_statistics(model, part, temperature=temperature), conversations, max_tokens
            )

    @torch.no_grad()
    def segmenter_statistics(
        self, conversations: Conversations, *, max_tokens: int
    ) -> tuple[Float[Tensor, "b t"], ...]:
        """Log-probabilities and entropies, at temperature 1, of the model that the reward model names."""
        segmenter = self.segmenter
        if segmenter is None:
            return self.reference_statistics(conversations, temperature=1.0, max_tokens=max_tokens)
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

    start = load_causal_lm(config.model_name_or_path, dtype=torch.float32, device=device)
    segmenter = None
    # A reward model that names no segmenter leaves the cutting to the reference.
    own = ("", model_fingerprint(start))
    if reward_model is not None and reads_ids and reward_model.segmenter_fingerprint not in own:
        segmenter = reward_model.segmenter().requires_grad_(False)
    critic = _critic(config, reward_model, device) if config.advantage_estimator == "gae" else None
    policy, reference = _policy_and_reference(start, config, device, checkpoint)
    for model in filter(None, (policy, critic)):
        disable_dropout(model)
        if config.gradient_checkpointing:
            _checkpoint_gradients(model)
    return Roles(TokenPolicy(policy), reference, critic, reward_model, segmenter, chat)


def _critic(config: PPOConfig, reward_model: SegmentRewardModel | None, device: torch.device) -> Critic:
    critic = Critic(_with_adapter(_critic_trunk(config, device), config)).to(device)
    if config.critic_init == "reward_model":
        assert reward_model is not None
        critic.head.weight.data.copy_(reward_model.head.weight)
    return critic


def _policy_and_reference(
    start: nn.Module, config: PPOConfig, device: torch.device, checkpoint: Path | None
) -> tuple[nn.Module, nn.Module | None]:
    if config.use_peft:
        if checkpoint is None:
            return _with_adapter(start, config), None
        from peft import PeftModel

        return PeftModel.from_pretrained(start, checkpoint, is_trainable=True), None  # type: ignore[arg-type]
    source = config.model_name_or_path if checkpoint is None else str(checkpoint)
    policy = load_causal_lm(source, dtype=torch.float32, device=device)
    return policy, start.requires_grad_(False)


def _critic_trunk(config: PPOConfig, device: torch.device) -> nn.Module:
    if config.critic_init == "sft":
        return trunk_of(load_causal_lm(config.model_name_or_path, dtype=torch.float32, device=device))
    copy = SegmentRewardModel.from_pretrained(config.reward_model_path, device=device).model
    merged: Any = copy.merge_and_unload() if hasattr(copy, "merge_and_unload") else copy  # type: ignore[operator]
    return trunk_of(merged).float()


def _with_adapter(model: nn.Module, config: PPOConfig) -> nn.Module:
    if not config.use_peft:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    targets: Any = config.lora_target_modules
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    return get_peft_model(model, lora)  # type: ignore[arg-type]


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
