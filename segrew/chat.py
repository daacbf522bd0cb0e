"""From messages to token ids and back: the one tokenisation path of training, evaluation and PPO.

Prompt and response are always encoded apart, so the border between them is the same token in every path
even where a merge would cross it, and a response sampled by the policy is scored on its own ids.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from jinja2 import TemplateError

from segrew.chat_templates import Message, freeze_template, merge_system, takes_system, template_text
from segrew.packing import in_common
from segrew.response_text import ResponseText

_BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet


SystemRole = Literal["merge", "error"]


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer with the chat template and stop token that go with it.

    Args:
        tokenizer: a fast Hugging Face tokenizer whose `chat_template` is set.
        stop_id: the token that ends a response.
        system_role: where the template has none, merge a system message into the first user turn, or refuse it.
    """

    tokenizer: Any
    stop_id: int
    system_role: SystemRole = "merge"

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, chat_template: str | None = None, system_role: SystemRole = "merge"
    ) -> "ChatFormat":
        """Take the tokenizer's own template, a named one, or a .jinja file.

        A template that writes today's date writes `FROZEN_DATE` from here on, in the saved tokenizer too.

        Raises:
            ValueError: there is no template, no such file, or no stop token.
        """
        if chat_template is not None:
            tokenizer.chat_template = template_text(chat_template)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{tokenizer.name_or_path or 'this tokenizer'} has no chat template (a base model); pass "
                "--chat_template raw (contents one after the other), chatml, or a .jinja file."
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{tokenizer.name_or_path}: the tokenizer names no end token; set eos_token in it.")
        freeze_template(tokenizer)
        return cls(tokenizer, _stop_token_of_template(tokenizer), system_role)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a response: the template's turn end and the tokenizer's end token."""
        return tuple(dict.fromkeys((self.stop_id, self.tokenizer.eos_token_id)))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of vocabulary, template and stop token; equal for equal token ids."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        content = json.dumps([vocabulary, self.tokenizer.chat_template, self.stop_id], ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def _leading_bos(self) -> list[int]:
        """The BOS that the tokenizer itself puts before a text, if it does."""
        bos = self.tokenizer.bos_token_id
        adds = bos is not None and self.tokenizer("", add_special_tokens=True)["input_ids"][:1] == [bos]
        return [bos] if adds else []

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _tokenize(self, text: str, room: int | None = None, *, tail: bool = False, **options: Any) -> Any:
        """Tokenise; a text of more than `room` tokens only as far as that shows, from its head or its tail.

        So one enormous answer costs no more than the longest that is used.
        """
        reach = len(text) if room is None else (room + 64) * self._longest_token
        if len(text) > reach:
            part = text[-reach:] if tail else text[:reach]
            encoded = self.tokenizer(part, add_special_tokens=False, **options)
            if len(encoded["input_ids"]) > (room or 0):
                return encoded
        return self.tokenizer(text, add_special_tokens=False, **options)

    @cached_property
    def _merges_system(self) -> bool:
        return not takes_system(self.tokenizer)

    def _adapted(self, messages: list[Message]) -> list[Message]:
        """Return the messages as a template without system role takes them; unchanged for any other."""
        if not self._merges_system:
            return messages
        merged = merge_system(messages)
        if merged is not messages and self.system_role == "error":
            raise ValueError(
                "the chat template has no role 'system' (--system_role merge puts it into the first turn)."
            )
        if merged is not messages:
            _ = self._told_of_merging
        return merged

    @cached_property
    def _told_of_merging(self) -> None:
        """Warn, the first time that this is asked for."""
        warnings.warn(
            "the chat template has no role 'system': system messages are put at the head of the first user turn.",
            stacklevel=2,
        )

    def render(self, messages: list[Message], template: dict[str, Any] | None = None, *, answered: bool = False) -> str:
        """Return the text of a prompt up to where the assistant begins to speak.

        Args:
            template: further arguments of the template, such as tools.
            answered: the messages are a whole conversation, after which nobody is about to speak.

        Raises:
            ValueError: the template refuses the messages.
        """
        messages = self._adapted(messages)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not answered, **(template or {})
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses a prompt of {roles}: {error}") from error

    def prompt_ids(
        self, prompt: list[Message] | str, template: dict[str, Any] | None = None, *, room: int | None = None
    ) -> list[int]:
        """Return the ids of a prompt, given as messages or as rendered text, with at most one leading BOS.

        A prompt of no messages, before answers that are whole texts, is the BOS, or else the end token.

        Args:
            template: further arguments of the template, such as tools.
            room: tokens of which the last are used; a prompt that is far longer comes back as its own end.
        """
        if not prompt:
            bos = self.tokenizer.bos_token_id
            return [self.tokenizer.eos_token_id if bos is None else bos]
        text = prompt if isinstance(prompt, str) else self.render(prompt, template)
        ids = self._tokenize(text, room, tail=True)["input_ids"]
        if ids[:1] != self._leading_bos:  # else the template, or the text itself, begins with it
            ids = self._leading_bos + ids
        if not ids:
            raise ValueError("a prompt of no tokens: the first response token has nothing before it.")
        return ids

    def response_ids(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the ids of a finished response: its text and the stop token, nothing after it.

        Args:
            room: tokens of which the first are used; of a response that is far longer the rest is not tokenised.
        """
        return [*self._tokenize(text, room)["input_ids"], self.stop_id]

    def decode(self, ids: list[int]) -> str:
        """Return the text of response ids, without stop or other special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        """What each token adds to a text, as far as tokens have been met."""
        return {}

    @cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """Ids of some text and its length: decoders may drop the space of a token that stands first."""
        ids = self._tokenize("a")["input_ids"]
        return ids, len(self.decode(ids))

    def _added(self, ids: list[int]) -> str:
        before, length = self._anchor
        return self.decode([*before, *ids])[length:]

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._added([token])
        return self._pieces[token]

    def _growing(self, ids: list[int]) -> Iterator[list[str]]:
        """Yield the texts of growing prefixes of each run of tokens that only together are whole characters."""
        run: list[int] = []
        prefixes: list[str] = []
        for j, token in enumerate(ids):
            piece = self._piece(token) if j else self.decode([token])
            if _BROKEN in piece:
                run.append(token)
                prefixes.append(self._added(run))
            if run and (_BROKEN not in piece or _BROKEN not in prefixes[-1]):
                yield prefixes
                run, prefixes = [], []
            if _BROKEN not in piece:
                yield [piece]
        if run:
            yield prefixes

    def response_text(self, ids: list[int]) -> ResponseText:
        """Return the text of response ids with the characters of each token; the ids may be any that were sampled."""
        text, runs = self.decode(ids), list(self._growing(ids))
        if "".join(run[-1] for run in runs) != text:  # a decoder whose texts do not add up
            runs = [[self.decode(ids[: j + 1]) for j in range(len(ids))]]
        spans: list[tuple[int, int]] = []
        built = 0
        for prefixes in runs:
            spans += [(built + start, built + end) for start, end in _covered(prefixes)]
            built += len(prefixes[-1])
        return ResponseText(text, spans)

    def response_texts(self, responses: Sequence[list[int]]) -> "ResponseTexts":
        """Return the text of each response."""
        return ResponseTexts(self, responses)

    def cut_text(self, ids: list[int], ends: list[int], text: str | None = None) -> list[tuple[int, int]]:
        """Map units, given by their last token (inclusive), to character offsets that tile the response.

        A cut inside a multi-byte character moves to the end of that character.

        Args:
            text: what `ids` were encoded from; None tiles their decoded text instead.
        """
        if text is not None:
            offsets = self._tokenize(text, len(ids), return_offsets_mapping=True)["offset_mapping"]
            places = [offsets[end][1] if end < len(offsets) else len(text) for end in ends[:-1]]
        else:
            decoded = self.response_text(ids)
            text, places = decoded.text, [decoded.spans[end][1] for end in ends[:-1]]
        cuts = [0]
        for place in places:
            cuts.append(max(cuts[-1], min(place, len(text))))
        return list(zip(cuts, [*cuts[1:], len(text)], strict=True))


@dataclass(frozen=True)
class ResponseTexts(Sequence[ResponseText]):
    """Texts of responses, made each time they are asked for: spans take far more memory than ids."""

    chat: ChatFormat
    responses: Sequence[list[int]]

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, row: Any) -> Any:
        return self.chat.response_text(self.responses[row])


def _covered(prefixes: list[str]) -> list[tuple[int, int]]:
    """Characters [start, end) of each token, from the texts of growing prefixes.

    What a prefix has and the whole has not is a replacement mark for a character that a later token ends; a token
    that adds nothing to such a mark is part of what it stands for.
    """
    whole, spans, end, unfinished = prefixes[-1], [], 0, False
    for before, prefix in pairwise(["", *prefixes]):
        start = end - (unfinished or (before == prefix and prefix.endswith(_BROKEN)))
        same = in_common(prefix, whole)
        unfinished = same < len(prefix) and same < len(whole)
        end = max(end, same + unfinished)
        spans.append((start, end))
    return spans


def ids_after_answer(tokenizer: Any) -> list[int]:
    """Return the ids of what the template writes after an assistant's words.

    Raises:
        ValueError: the template does not render a conversation.
    """
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "stop-token-probe"}]
    try:
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception as error:
        raise ValueError(f"the chat template does not render a user and an assistant message: {error}") from error
    return tokenizer(rendered.rpartition("stop-token-probe")[2], add_special_tokens=False)["input_ids"]


def _stop_token_of_template(tokenizer: Any) -> int:
    """Find the special token that the template writes after an assistant's words, else the end token."""
    added = tokenizer.added_tokens_decoder  # holds special tokens that the tokenizer has no name for, such as <|end|>
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    return next((i for i in ids_after_answer(tokenizer) if i in special), tokenizer.eos_token_id)
