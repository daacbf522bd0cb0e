"""Checks of `segrew doctor` on the way from messages to token ids and back."""

from itertools import takewhile
from typing import Any

from policy.doctor_subject import Finding, Subject
from reward_models.score import Answer
from segrew.chat import ChatFormat, ids_after_answer
from segrew.chat_templates import freeze_date, takes_system
from segrew.language_models import plain_model, unused_pad_id
from segrew.packing import in_common

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
AWKWARD = "Naïve café, 東京 🙂 👨‍👩‍👧\n\n```python\n    x  =  1\n```\n\t- e\u0301 & “quotes”"


def chat_template(chat: ChatFormat) -> Finding:
    """There is a chat template, and it renders a conversation."""
    stops = ", ".join(chat.tokenizer.convert_ids_to_tokens(list(chat.stop_ids)))
    count = len(chat.prompt_ids(QUESTION))
    return Finding("ok", f"{count} tokens of a short prompt, stops at {stops}", count)


def begin_token(chat: ChatFormat) -> Finding:
    """A prompt begins with exactly one BOS."""
    bos = chat.tokenizer.bos_token_id
    if bos is None:
        return Finding("ok", "the tokenizer has none", 0)

    def leading(ids: list[int]) -> int:
        return len(list(takewhile(lambda token: token == bos, ids)))

    count = leading(chat.prompt_ids(QUESTION))
    both = leading(chat.tokenizer(chat.render(QUESTION))["input_ids"])
    name = chat.tokenizer.bos_token
    if count > 1:
        remedy = f"Take one {name} out of the chat template: the model was trained with one."
        return Finding("fault", f"{count} at the head of a prompt", count, remedy)
    if count == 0:
        remedy = f"If the model was trained with {name}, write {{{{ bos_token }}}} at the head of its chat template."
        return Finding("warning", "0 at the head of a prompt", 0, remedy)
    if both > 1:
        remedy = (
            f"Tokenise the template's text with add_special_tokens=False, as segrew does: it holds {name}, and the "
            "tokenizer would add another."
        )
        return Finding("warning", f"1 here, {both} where special tokens are added", both, remedy)
    return Finding("ok", "1 at the head of a prompt", 1)


def stop_token(chat: ChatFormat) -> Finding:
    """The template writes the stop token after an answer."""
    after, name = ids_after_answer(chat.tokenizer), chat.tokenizer.convert_ids_to_tokens(chat.stop_id)
    if chat.stop_id in after:
        return Finding("ok", f"{name} (id {chat.stop_id})", chat.stop_id)
    remedy = (
        f"Write {name} after an answer in the chat template: segrew ends answers with it, but a model trained on this "
        "template elsewhere never learnt to stop."
    )
    return Finding("warning", "none after an answer", chat.stop_id, remedy)


def pad_token(chat: ChatFormat, subject: Subject) -> Finding:
    """Padding is told from the end of an answer."""
    tokenizer, reward_model = chat.tokenizer, subject.part_or_none("reward_model")
    other = unused_pad_id(tokenizer, chat.stop_ids)
    take = f"Set pad_token to {tokenizer.convert_ids_to_tokens(other)!r} (id {other})"
    if reward_model is not None:
        pad = plain_model(reward_model.model).config.pad_token_id
        if pad is None or pad in chat.stop_ids:
            remedy = f"{take} in the reward model's config.json: stock classes find the end of a row by it."
            return Finding("fault", f"the reward model pads with id {pad}", pad, remedy)
    pad = tokenizer.pad_token_id
    if pad is None or pad in chat.stop_ids:
        what = "no pad token" if pad is None else f"{tokenizer.pad_token} pads and ends answers"
        return Finding(
            "warning", what, pad, f"{take} in the tokenizer: code that masks by pad ids loses the stop token."
        )
    return Finding("ok", f"{tokenizer.pad_token} (id {pad})", pad)


def date(template: str) -> Finding:
    """A prompt has the same ids on every day."""
    if freeze_date(template) == template:
        return Finding("ok", "0 calls for today's date", 0)
    count = template.count("strftime_now(")
    remedy = (
        "Write one date into a copy of the template and pass it as --chat_template FILE.jinja: segrew freezes it by "
        "itself, other programs give another prompt each day."
    )
    return Finding("warning", f"{count} calls for today's date", count, remedy)


def system_role(chat: ChatFormat) -> Finding:
    """The template takes a system message."""
    if takes_system(chat.tokenizer):
        return Finding("ok", "taken", 1)
    remedy = (
        "Nothing, where merging them is right: segrew puts system messages at the head of the first user turn "
        "(--system_role error refuses them), and other programs may drop or refuse them."
    )
    return Finding("warning", "refused or dropped", 0, remedy)


def border(chat: ChatFormat, answers: list[Answer]) -> Finding:
    """Prompt ids and response ids make up the ids of the whole conversation."""
    merged, apart = 0, list[str]()
    for answer in answers:
        whole = chat.render([*answer.prompt, _said(answer.response)], answer.template, answered=True)
        expected = chat.render(answer.prompt, answer.template) + answer.response
        ours = chat.prompt_ids(answer.prompt, answer.template) + chat.response_ids(answer.response)[:-1]
        if not whole.startswith(expected):
            place = in_common(whole, expected)
            written, asked = (text[place : place + 20] for text in (whole, expected))
            apart.append(f"{written!r} where segrew's prompt and answer have {asked!r}")
        merged += chat.prompt_ids(whole)[: len(ours)] != ours
    measured = f"{merged} of {len(answers)} conversations differ"
    if apart:
        remedy = (
            f"Make the template write an answer as its generation prompt opens it, and unchanged: it has {apart[0]}, "
            "so a model is asked in another form than it was trained in."
        )
        return Finding("fault", measured, merged, remedy)
    if merged:
        remedy = (
            "Nothing within segrew, which always encodes prompt and answer apart; a model that was trained on whole "
            "conversations saw other ids there, from a merge across the border or a space before a text, so train it "
            "on prompt and answer encoded apart, or end the generation prompt with a special token."
        )
        return Finding("warning", measured, merged, remedy)
    return Finding("ok", measured, 0)


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def round_trip(chat: ChatFormat, answers: list[Answer]) -> Finding:
    """Decoding the ids of an answer gives the answer."""
    lost = [a.response for a in answers if chat.decode(chat.response_ids(a.response)) != a.response]
    measured = f"{len(lost)} of {len(answers)} answers changed"
    if lost:
        remedy = (
            f"Take a tokenizer that keeps text: {_change(chat, lost[0])}, so what is shown and what reads text is not "
            "what was written."
        )
        return Finding("fault", measured, len(lost), remedy)
    if chat.decode(chat.response_ids(AWKWARD)) != AWKWARD:
        remedy = (
            f"Keep such text out of the data, or take a byte-level tokenizer: {_change(chat, AWKWARD)} in a text with "
            "accents, emoji and code."
        )
        return Finding("warning", f"{measured}, an awkward text did", len(lost), remedy)
    return Finding("ok", measured, 0)


def _change(chat: ChatFormat, text: str) -> str:
    back = chat.decode(chat.response_ids(text))
    place = in_common(text, back)
    return f"{text[place : place + 12]!r} becomes {back[place : place + 12]!r}"
