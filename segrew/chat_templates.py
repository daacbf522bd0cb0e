"""Chat templates: named ones, the date that some write, and those that know no system role."""

import re
import warnings
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]  # role and content, and what else a template reads, such as tool_calls

NAMED_TEMPLATES = {
    "raw": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
FROZEN_DATE = date(2024, 7, 26)  # what Llama 3.1's own template writes where it knows no date
_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


def template_text(chat_template: str) -> str:
    """Return the text of a named template or a .jinja file.

    Raises:
        ValueError: it is neither.
    """
    if chat_template in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[chat_template]
    if not Path(chat_template).is_file():
        raise ValueError(
            f"--chat_template {chat_template}: neither one of {sorted(NAMED_TEMPLATES)} nor a .jinja file."
        )
    return Path(chat_template).read_text(encoding="utf-8")


def freeze_date(template: str) -> str:
    """Write `FROZEN_DATE` in place of every call for today's date, so that a prompt has the same ids on every day.

    Raises:
        ValueError: the template asks for the date in another way than by a format of its own.
    """
    frozen = _DATE_CALL.sub(lambda call: repr(FROZEN_DATE.strftime(call[2])), template)
    if re.search(r"strftime_now\s*\(", frozen):
        raise ValueError(
            "the chat template asks for today's date with a format that is not written out in it, so it cannot be "
            "frozen; write the date into a copy of the template and pass that as --chat_template FILE.jinja."
        )
    return frozen


def freeze_template(tokenizer: Any) -> None:
    """Take today's date out of the tokenizer's template, or templates, and say so."""
    template = tokenizer.chat_template
    frozen = {k: freeze_date(v) for k, v in template.items()} if isinstance(template, dict) else freeze_date(template)
    if frozen != template:
        warnings.warn(
            f"the chat template writes today's date; segrew writes {FROZEN_DATE:%d %b %Y} there on every day.",
            stacklevel=3,
        )
        tokenizer.chat_template = frozen


def takes_system(tokenizer: Any) -> bool:
    """Whether the tokenizer's template renders a system message, neither refusing nor dropping it."""
    messages = [{"role": "system", "content": "system-role-probe"}, {"role": "user", "content": "x"}]
    try:
        return "system-role-probe" in tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError:
        return False


def merge_system(messages: list[Message]) -> list[Message]:
    """Put a leading system message at the head of the first user turn, a blank line between.

    Raises:
        ValueError: user and assistant do not take turns, which a template without system role needs.
    """
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in turns or any(one == other != "tool" for one, other in pairwise(turns)):
        raise ValueError(
            f"the chat template knows no system role and needs user and assistant in turn; found {', '.join(roles)}."
        )
    if turns == roles:
        return messages
    system, *rest = messages
    if roles[1:2] != ["user"]:
        return [{**system, "role": "user"}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
