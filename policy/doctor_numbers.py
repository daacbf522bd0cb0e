"""Checks of `segrew doctor` that run the models: the same numbers in every batch, layout and dtype, and a KL of 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policy.doctor_subject import DoctorConfig, Finding, Reader, Skip
from policy.losses import kl_estimates
from policy.roles import Roles, TokenPolicy, disable_dropout
from policy.rollout import Answers, Sampling, in_micro_batches, sample_answers
from segrew.chat import ChatFormat
from segrew.conversations import TOKENS_PER_BATCH, Conversations, response_states
from segrew.language_models import best_dtype, context_length, plain_model

SAME = 1e-4  # of float32 in another order of summation, for numbers of size 1
NATS = 0.1  # mean error of a log-probability in 16 bits above which ratios and KL are more noise than signal
SPREAD = 0.1  # the same of a reward, in standard deviations
DRAWN = 16  # tokens of each answer that is drawn


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, NaN as infinite, for numbers larger than 1 as a share of the largest."""
    first, second = torch.cat(one), torch.cat(other)
    difference = (first - second).abs().nan_to_num(nan=torch.inf).max()
    return (difference / first.abs().nan_to_num(posinf=1.0).max().clamp(min=1.0)).item()


def same(worst: float, measured: str, remedy: str) -> Finding:
    """Numbers that should be equal: ok where the worst difference is of rounding."""
    return Finding("ok", measured, worst) if worst <= SAME else Finding("fault", measured, worst, remedy)


def _same(differences: dict[str, float], remedy: str) -> Finding:
    measured = ", ".join(f"{value:.1e} in {name}" for name, value in differences.items())
    return same(max(differences.values()), measured, remedy)


def batch_size(readers: list[Reader]) -> Finding:
    """A row has the same numbers alone and among others."""
    found = {}
    for reader in readers:
        alone = [reader.read([row])[0] for row in range(len(reader.conversations))]
        found[reader.name] = _apart(alone, reader.read())
    return _same(found, "Rows see each other in a batch: report the model's family, and score with a batch size of 1.")


def padding_side(readers: list[Reader]) -> Finding:
    """A row has the same numbers padded on its left, as prompts are when answers are drawn, and on its right."""
    found = {r.name: _apart(r.read(layout="padded"), r.read(layout="padded_left")) for r in readers}
    return _same(
        found,
        "The model reads padding or miscounts positions behind it: update transformers or take another attention "
        "(attn_implementation), for answers are drawn from prompts padded on the left.",
    )


def packed_rows(readers: list[Reader]) -> Finding:
    """A row has the same numbers packed and padded."""
    found = {}
    for reader in readers:
        try:
            packed = reader.read(layout="packed")
        except ValueError as reason:
            raise Skip(str(reason).rstrip(".")) from None
        found[reader.name] = _apart(packed, reader.read(layout="padded"))
    return _same(found, "Packed rows leak into each other: report the model's family; padded rows are right.")


def bfloat16(readers: list[Reader]) -> Finding:
    """The numbers in bfloat16 are close to those in float32."""
    return _half(readers, torch.bfloat16, "--bf16 false")


def float16(readers: list[Reader]) -> Finding:
    """The numbers in float16 are close to those in float32, where the device computes in it."""
    finding = _half(readers, torch.float16, "bfloat16 or float32")
    if finding.status == "fault":
        return Finding("warning", finding.measured, finding.value, finding.remedy)
    return finding


def _half(readers: list[Reader], dtype: torch.dtype, instead: str) -> Finding:
    errors, bounds, words = [], [], []
    for reader in readers:
        full = torch.cat(reader.read())
        try:
            half = torch.cat(reader.read(dtype=dtype))
        except RuntimeError as error:  # an operation that this device has not in this dtype
            raise Skip(f"not supported here: {str(error).splitlines()[0]}") from None
        off = (half - full).abs().mean().item()
        if reader.name == "rewards":
            errors.append(off / max(full.std().item(), 1e-12))
            bounds.append(SPREAD)
            words.append(f"rewards off by {errors[-1]:.3f} of their spread")
        else:
            k3 = kl_estimates(full, half)[2].mean().item()
            errors.append(off)
            bounds.append(NATS)
            words.append(f"log-probabilities off by {errors[-1]:.3f} nats (a KL of {k3:.1e})")
    measured, worst = ", ".join(words), max(errors)
    if not all(torch.tensor(errors).isfinite()):
        return Finding("fault", measured, worst, f"Take {instead}: numbers overflow.")
    if any(error > bound for error, bound in zip(errors, bounds, strict=True)):
        return Finding(
            "warning", measured, worst, f"Take {instead} for this model: the rounding is as large as effects."
        )
    return Finding("ok", measured, worst)


def _drawn(model: nn.Module, chat: ChatFormat, readers: list[Reader], config: DoctorConfig, *, greedy: bool) -> Answers:
    sampling = Sampling(max_new_tokens=min(DRAWN, config.max_new_tokens), greedy=greedy)
    room = (context_length(model) or 2**20) - sampling.max_new_tokens
    rows = next(reader.conversations for reader in readers if reader.model is model)
    prompts = [prompt[-room:] for prompt in rows.prompts]
    return sample_answers(model, chat, prompts, sampling, torch.Generator().manual_seed(0))


@torch.no_grad()
def decoding(model: nn.Module, chat: ChatFormat, readers: list[Reader], config: DoctorConfig) -> Finding:
    """Greedy decoding, with cache and padded prompts, takes the tokens that scoring finds likeliest."""
    rows = _drawn(model, chat, readers, config, greedy=True).conversations
    logits = plain_model(model).get_output_embeddings()(response_states(model, rows).before).float()
    taken = logits.gather(-1, rows.response_ids[rows.mask].to(logits.device)[:, None]).squeeze(-1)
    short = (logits.max(-1).values - taken).nan_to_num(nan=torch.inf)
    worst = (short.max() / logits.abs().nan_to_num(posinf=1.0).max().clamp(min=1.0)).item()
    measured = f"{worst:.1e} below the likeliest, {short.numel()} tokens"
    remedy = (
        "Generation and scoring disagree, so log-probabilities do not describe the answers drawn: update transformers "
        "or take another attention (attn_implementation)."
    )
    return same(worst, measured, remedy)


@torch.no_grad()
def first_kl(
    model: nn.Module, reference: nn.Module, chat: ChatFormat, readers: list[Reader], config: DoctorConfig
) -> Finding:
    """Before the first update policy and reference agree on drawn answers, in PPO's own passes and dtype."""
    rows = _drawn(model, chat, readers, config, greedy=False).conversations
    policy = TokenPolicy(model)
    roles = Roles(policy, reference, None, None, None, chat, fingerprint="")
    device = next(model.parameters()).device
    dtype = best_dtype(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        with _as_it_trains(model):
            logprobs, _ = in_micro_batches(lambda part: policy(part, 1.0), rows, TOKENS_PER_BATCH)
        (others,) = roles.reference_pass(rows, temperatures=[1.0], max_tokens=TOKENS_PER_BATCH).logprobs
    worst, kl = _largest(logprobs - others, rows), _largest(kl_estimates(logprobs, others)[2], rows)
    measured = f"log-ratios up to {worst:.1e}, k3 up to {kl:.1e}, {str(dtype).removeprefix('torch.')}"
    remedy = (
        "Policy and reference must be one model in one dtype without dropout: PPO would pay a KL before it has "
        "changed anything, and ratios would not start at 1."
    )
    return same(worst, measured, remedy)


def _largest(numbers: Float[Tensor, "b t"], rows: Conversations) -> float:
    return numbers[rows.mask.to(numbers.device)].abs().nan_to_num(nan=torch.inf).max().item()


@contextmanager
def _as_it_trains(model: Any) -> Iterator[None]:
    """In training mode, as PPO has it with gradient checkpointing, the dropout that it knows of turned off."""
    disable_dropout(model)
    model.train()
    try:
        yield
    finally:
        model.eval()
