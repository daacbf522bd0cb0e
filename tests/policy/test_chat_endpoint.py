"""Requests to a stand-in endpoint: what is sent, what is tried again and for how long, and what ends the run."""

import http.client
import json

import pytest

from policy.chat_endpoint import ChatEndpoint, EndpointReply


def sequence(*said):
    """Answer with each of these in turn, the last one for ever."""
    left = list(said)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def test_what_is_sent(stand_in):
    server = stand_in(lambda body: "fine")
    endpoint = ChatEndpoint(server.url + "/", "judge-1", key="secret", temperature=0.5, max_tokens=9)
    assert endpoint.ask("Which?") == EndpointReply("fine")
    assert server.requests == [
        {"model": "judge-1", "messages": [{"role": "user", "content": "Which?"}], "temperature": 0.5, "max_tokens": 9}
    ]
    (headers,) = server.headers
    assert (headers["path"], headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert "secret" not in repr(endpoint)


def test_what_is_left_out(stand_in):
    server = stand_in(lambda body: "fine")
    ChatEndpoint(server.url, "judge-1", temperature=None, max_tokens=None).ask("Which?")
    assert set(server.requests[0]) == {"model", "messages"} and "Authorization" not in server.headers[0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_busy_endpoint_is_asked_again_after_growing_waits(stand_in, status):
    server = stand_in(sequence((status, "busy"), (status, "busy"), (status, "busy"), "at last"))
    assert ChatEndpoint(server.url, "m").ask("?").text == "at last"
    assert len(server.requests) == 4
    assert all(0.75 * 2**k <= wait <= 2**k for k, wait in enumerate(server.waits)) and len(server.waits) == 3


def test_the_endpoints_own_wait_is_kept_within_bounds(stand_in):
    said = [(429, "", ("Retry-After", value)) for value in ("7", "9999", "-3", "Wed, 21 Oct 2015 07:28:00 GMT")]
    server = stand_in(sequence(*said, "at last"))
    ChatEndpoint(server.url, "m").ask("?")
    assert server.waits[:3] == [7.0, 60.0, 0.0] and 6.0 <= server.waits[3] <= 8.0


def test_tries_end(stand_in):
    server = stand_in(lambda body: (503, "out of\n order"))
    with pytest.raises(ValueError, match="no answer after 3 tries, the last one: 503 out of order"):
        ChatEndpoint(server.url, "m", max_retries=2).ask("?")
    assert len(server.requests) == 3 and len(server.waits) == 2


def test_an_endpoint_that_cannot_be_reached_ends_it_at_once(stand_in):
    server = stand_in(lambda body: "x")
    ChatEndpoint(server.url, "m").require_reachable()  # which it answers with 501
    server.shutdown()
    server.server_close()
    endpoint = ChatEndpoint(server.url, "m")
    for call in (endpoint.require_reachable, lambda: endpoint.ask("?")):
        with pytest.raises(ValueError, match=rf"{server.url}: no connection .*refused.*does the endpoint run"):
            call()
    assert server.waits == []


def test_a_slow_or_lost_reply_is_waited_for_again(stand_in, monkeypatch):
    server = stand_in(lambda body: "at last")
    errors = [TimeoutError("timed out"), ConnectionResetError("reset"), http.client.RemoteDisconnected("gone")]
    post = ChatEndpoint._post

    def flaky(endpoint, prompt):
        if errors:
            raise errors.pop(0)
        return post(endpoint, prompt)

    monkeypatch.setattr(ChatEndpoint, "_post", flaky)
    assert ChatEndpoint(server.url, "m").ask("?").text == "at last" and len(server.waits) == 3


@pytest.mark.parametrize(
    "status, hint", [(401, "environment variable MY_KEY"), (403, "MY_KEY"), (404, "--judge_model m"), (402, "refuses")]
)
def test_a_refusal_for_good_ends_at_once_and_never_shows_the_key(stand_in, status, hint):
    server = stand_in(lambda body: (status, "wrong key hunter2 given"))
    with pytest.raises(ValueError, match=hint) as error:
        ChatEndpoint(server.url, "m", key="hunter2", key_source="MY_KEY").ask("?")
    assert len(server.requests) == 1 and "hunter2" not in str(error.value) and "***" in str(error.value)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_request_that_is_turned_down_is_told_apart(stand_in, status):
    server = stand_in(lambda body: (status, "content filter"))
    assert ChatEndpoint(server.url, "m").ask("?") == EndpointReply("", f"{status} content filter")


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", json.dumps({"choices": []})])
def test_another_kind_of_server_is_refused(stand_in, body):
    server = stand_in(lambda _: (200, body))
    with pytest.raises(ValueError, match="no chat completion"):
        ChatEndpoint(server.url, "m").ask("?")


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_reply_is_no_text(stand_in, content):
    server = stand_in(lambda _: (200, json.dumps({"choices": [{"message": {"content": content}}]})))
    assert ChatEndpoint(server.url, "m").ask("?") == EndpointReply("", "an empty reply")
