"""Checks of `segrew doctor` on what is on disk: tokenizer, weights, context, generation settings."""

from typing import Any

from torch import nn

from policy.doctor_subject import DoctorConfig, Finding, Skip, Subject
from policy.roles import check_same_tokens, check_vocabulary
from policy.rollout import Sampling
from policy.room import check_room
from reward_models import SegmentRewardModel
from reward_models.card import CARD_FILE, RewardModelCard
from reward_models.checkpoints import find_checkpoint
from reward_models.score import Answer
from segrew.chat import ChatFormat
from segrew.language_models import context_length

# Settings under which log-probabilities do not describe the tokens that are drawn, each with its harmless value.
HARMLESS: dict[str, int | float | None] = {
    "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "num_beams": 1,
    "min_length": 0, "min_new_tokens": 0, "bad_words_ids": None, "suppress_tokens": None, "sequence_bias": None,
}  # fmt: skip


def _models(subject: Subject) -> dict[str, nn.Module]:
    """The models that load, by their name in a message."""
    model, reward_model = subject.part_or_none("model"), subject.part_or_none("reward_model")
    found = {"the model": model, "the reward model": reward_model and reward_model.model}
    if not any(found.values()):
        raise Skip("no model that loads")
    return {name: model for name, model in found.items() if model is not None}


def model_loads(model: nn.Module) -> Finding:
    """The language model loads whole."""
    return _size(model, type(model).__name__)


def reward_model_loads(reward_model: SegmentRewardModel) -> Finding:
    """The reward model loads with its head, and its tokenizer is the one it was trained with."""
    return _size(reward_model.model, reward_model.segmentation.label)


def _size(model: nn.Module, what: str) -> Finding:
    weights = sum(p.numel() for p in model.parameters())
    return Finding("ok", f"{weights / 1e6:,.1f} M weights, {what}", weights)


def finite_weights(subject: Subject) -> Finding:
    """No weight is NaN or infinite."""
    bad: dict[str, int] = {}
    for name, model in _models(subject).items():
        for weight, values in model.named_parameters():
            if not values.isfinite().all():
                bad[f"{weight} of {name}"] = int((~values.isfinite()).sum())
    if not bad:
        return Finding("ok", "0 weights that are no numbers", 0)
    remedy = f"Restore the files or train again: the first is {next(iter(bad))}, and every number after it is noise."
    return Finding("fault", f"{sum(bad.values())} weights that are no numbers", sum(bad.values()), remedy)


def vocabulary(subject: Subject, chat: ChatFormat) -> Finding:
    """Every token has an embedding."""
    rows = {name: check_vocabulary(chat, model, name) for name, model in _models(subject).items()}
    measured = ", ".join(f"{count} rows of {name}" for name, count in rows.items())
    return Finding("ok", f"{len(chat.tokenizer)} tokens, {measured}", len(chat.tokenizer))


def same_tokens(chat: ChatFormat, model: nn.Module, reward_model: SegmentRewardModel, config: DoctorConfig) -> Finding:
    """Policy and reward model read the same ids in the same template."""
    check_same_tokens(chat, reward_model, str(config.reward_model), str(config.model_name_or_path))
    return Finding("ok", f"{len(chat.tokenizer)} tokens and the template agree", 0)


def context(subject: Subject, chat: ChatFormat, answers: list[Answer], config: DoctorConfig) -> Finding:
    """The longest prompt here and the longest answer fit into what the models have positions for."""
    models = _models(subject)
    needed = [(a.id or "a prompt", len(chat.prompt_ids(a.prompt, a.template)) + config.max_new_tokens) for a in answers]
    remedy = (
        f"lower --max_new_tokens {config.max_new_tokens}, or leave longer prompts out (--max_prompt_length of PPO)."
    )
    most = max(check_room(model, needed, name=name, remedy=remedy) for name, model in models.items())
    limits = [limit for model in models.values() if (limit := context_length(model)) is not None]
    return Finding("ok", f"{most} of {min(limits)} tokens" if limits else f"{most} tokens, no limit", most)


def training_length(reward_model: SegmentRewardModel, answers: list[Answer], config: DoctorConfig) -> Finding:
    """The same fits into what the reward model was trained on, past which `segrew score` cuts."""
    most = max(len(reward_model.chat.prompt_ids(a.prompt, a.template)) for a in answers) + config.max_new_tokens
    positions, given = context_length(reward_model.model), _max_length(config)
    if positions is not None and given is not None and given > positions:
        remedy = f'Write "max_length": {positions} into {CARD_FILE}; until then longer rows are cut to that.'
        return Finding("fault", f"max_length {given} of {positions} positions", given, remedy)
    limit = config.max_length or reward_model.card.max_length
    measured = f"{most} of {limit} tokens"
    if most <= limit:
        return Finding("ok", measured, most)
    remedy = f"Lower --max_new_tokens {config.max_new_tokens}, or train the reward model with --max_length {most}."
    return Finding("warning", measured, most, remedy)


def _max_length(config: DoctorConfig) -> int | None:
    """What the reward model's own file says; None for a checkpoint of another program."""
    path = find_checkpoint(str(config.reward_model))
    return RewardModelCard.load(path).max_length if (path / CARD_FILE).is_file() else None


def stop_settings(model: nn.Module, chat: ChatFormat) -> Finding:
    """generation_config.json names the token that ends an answer."""
    settings: Any = model.generation_config
    given = settings.eos_token_id
    named = given if isinstance(given, list) else [] if given is None else [given]
    tokens = chat.tokenizer.convert_ids_to_tokens(chat.stop_id)
    if beyond := [token for token in named if token >= len(chat.tokenizer)]:
        remedy = f"Write the id of {tokens!r}, {chat.stop_id}, as eos_token_id into generation_config.json."
        return Finding("fault", f"eos_token_id {beyond} of {len(chat.tokenizer)} tokens", beyond[0], remedy)
    if chat.stop_id not in named:
        remedy = (
            f"Add {chat.stop_id} ({tokens!r}, the template's turn end) to eos_token_id in generation_config.json: "
            "segrew stops there by itself, other programs run on."
        )
        return Finding("warning", f"eos_token_id {named}", chat.stop_id, remedy)
    return Finding("ok", f"eos_token_id {named}, the template ends with {chat.stop_id}", chat.stop_id)


def sampling_settings(model: nn.Module) -> Finding:
    """generation_config.json holds nothing under which log-probabilities do not describe the samples."""
    settings: Any = model.generation_config
    given = {name: getattr(settings, name, None) for name in HARMLESS}
    active = {name: value for name, value in given.items() if value not in (None, [], HARMLESS[name])}
    if not active:
        return Finding("ok", "0 settings that change the distribution", 0)
    why = Sampling(top_k=active.get("top_k", 0), top_p=active.get("top_p", 1.0)).warning
    remedy = (
        "Delete them from generation_config.json, or turn them off where another program draws answers to learn from "
        "(`segrew ppo` leaves them out by itself)"
    )
    remedy += f"; {why.split(': ', 1)[1]}" if why else ": log-probabilities do not describe such answers."
    listed = ", ".join(f"{name} {value}" for name, value in active.items())
    return Finding("warning", listed, len(active), remedy)
