"""Asking an OpenAI-compatible endpoint, with retries that end."""

import http.client
import json
import random
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from time import sleep
from typing import Any

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
_TRY_AGAIN = {408, 409, 425, 429}
_NOT_THIS_ONE = {400, 413, 422}


@dataclass(frozen=True)
class EndpointReply:
    """What the model said; `error` says why there is no text, where this one request was turned down."""

    text: str
    error: str = ""


@dataclass(frozen=True)
class ChatEndpoint:
    """A chat model behind `base_url`/chat/completions.

    Args:
        key: sent as a bearer token; empty for none. key_source: where it was looked for, for messages.
        temperature, max_tokens: None leaves them to the endpoint.
        timeout: seconds for one try. max_retries: tries after the first one.
    """

    base_url: str
    model: str
    key: str = field(default="", repr=False)
    key_source: str = ""
    temperature: float | None = 0.0
    max_tokens: int | None = None
    timeout: float = 120.0
    max_retries: int = 5

    def ask(self, prompt: str) -> EndpointReply:
        """Send one message and return the reply. Thread-safe.

        An endpoint that is busy, broken or slow (429, 5xx, a lost connection) is asked again after 1, 2, 4, … seconds,
        or after what it says itself; one that cannot be reached is not.

        Raises:
            ValueError: it stays so, refuses the key or the model, or is no such endpoint.
        """
        failure = ""
        for attempt in range(self.max_retries + 1):
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.75, 1.0)
            try:
                return self._post(prompt)
            except urllib.error.HTTPError as error:
                failure = f"{error.code} {self._said(error)}"
                if error.code in _NOT_THIS_ONE:
                    return EndpointReply("", failure)
                if error.code not in _TRY_AGAIN and error.code < 500:
                    raise ValueError(self._refusal(error.code, failure)) from None
                wait = _retry_after(error.headers.get("Retry-After"), wait)
            except (OSError, http.client.HTTPException) as error:  # cut off, or too slow
                self._refuse_unreachable(error)
                failure = f"{type(error).__name__}: {error}"
            if attempt < self.max_retries:
                sleep(wait)
        raise ValueError(f"{self.base_url}: no answer after {self.max_retries + 1} tries, the last one: {failure}")

    def require_reachable(self) -> None:
        """Ask for the list of models, and take any reply for a sign of life.

        Raises:
            ValueError: nobody listens there.
        """
        try:
            urllib.request.urlopen(f"{self.base_url.rstrip('/')}/models", timeout=min(self.timeout, 10)).close()
        except urllib.error.HTTPError as reply:
            reply.close()
        except (OSError, http.client.HTTPException) as error:  # too slow for this may be quick enough for the rest
            self._refuse_unreachable(error)

    def _refuse_unreachable(self, error: Exception) -> None:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError | socket.gaierror | ssl.SSLError):
            raise ValueError(f"{self.base_url}: no connection ({reason}); does the endpoint run, is the URL right?")

    def _post(self, prompt: str) -> EndpointReply:
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body |= {name: getattr(self, name) for name in ("temperature", "max_tokens") if getattr(self, name) is not None}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(
            f"{self.base_url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            content = response.read()
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            shown = content[:100].decode(errors="replace")
            raise ValueError(
                f"{self.base_url}: answered with no chat completion ({shown!r}); is the URL right?"
            ) from None
        return EndpointReply(text) if isinstance(text, str) and text else EndpointReply("", "an empty reply")

    def _said(self, error: urllib.error.HTTPError) -> str:
        """The endpoint's own words, in short and without the key."""
        try:
            body = error.read(4096).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            body = ""
        shown = " ".join(body.split())[:200] or str(error.reason)
        return shown.replace(self.key, "***") if self.key else shown

    def _refusal(self, code: int, failure: str) -> str:
        hint = f"; the key is read from the environment variable {self.key_source}" if code in (401, 403) else ""
        hint = f"; is --judge_model {self.model} or --base_url wrong?" if code == 404 else hint
        return f"{self.base_url} refuses: {failure}{hint}"


def _retry_after(header: str | None, wait: float) -> float:
    """Seconds that the endpoint asks for, within bounds; else our own."""
    try:
        asked = float(header) if header is not None else wait
    except ValueError:  # a date
        return wait
    return min(max(asked, 0.0), LONGEST_WAIT)
