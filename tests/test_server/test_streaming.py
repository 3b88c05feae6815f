"""Streams hold what OpenAI's API promises, chunk by chunk (numbers: the behaviour list)."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import RunningServer, wait_until

SAY = "Grüße 🙂 und 안녕, STOP here"
ROUTES = ("chat", "complete")


def text_of(choice: dict[str, Any]) -> str:
    if "delta" in choice:
        return str(choice["delta"].get("content") or "")
    return str(choice["text"])


def whole_text(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def check_stream(events: list[Any], n: int = 1) -> dict[int, str]:
    """What must hold for every stream; returns the joined texts."""
    heads = {tuple(event[key] for key in ("id", "object", "created", "model")) for event in events}
    assert len(heads) == 1
    texts = dict.fromkeys(range(n), "")
    finished: dict[int, str] = {}
    roles: set[int] = set()
    for event in events:
        assert len(event["choices"]) <= 1
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in finished, "nothing comes after the finish"
            if choice["finish_reason"] is not None:
                finished[index] = choice["finish_reason"]
                assert text_of(choice) == ""
            elif choice.get("delta", {}).get("role"):
                assert index not in roles
                assert choice["delta"] == {"role": "assistant", "content": ""}
                roles.add(index)
            else:
                assert text_of(choice), "a content delta is never empty"
                assert "delta" not in choice or index in roles
            texts[index] += text_of(choice)
    assert sorted(finished) == list(range(n))
    return texts


@pytest.mark.parametrize("route", ROUTES)
def test_stop_string_is_never_shown(server: RunningServer, route: str) -> None:  # 1, 3
    call = getattr(server, route)
    fields: dict[str, Any] = {"stop": [" STOP", "never"], "max_tokens": 100}
    whole = call(f"@say:{SAY}@", **fields).json
    events = call(f"@say:{SAY}@", stream=True, **fields).events
    assert check_stream(events)[0] == whole_text(whole) == "Grüße 🙂 und 안녕,"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == " STOP"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_include_stop_string(server: RunningServer) -> None:
    fields: dict[str, Any] = {"stop": "STOP", "include_stop_str_in_output": True}
    assert whole_text(server.chat(f"@say:{SAY}@", **fields).json) == "Grüße 🙂 und 안녕, STOP"


def test_held_back_text_is_flushed(server: RunningServer) -> None:  # 3
    events = server.chat("@say:abcST@", stop="STOP", stream=True).events
    assert check_stream(events)[0] == "abcST"


def test_engine_is_told_of_a_stop(server: RunningServer) -> None:
    before = len(server.engine_events("stop"))
    server.chat("@say:one STOP and much more@@pause:20@", stop="STOP")
    wait_until(lambda: len(server.engine_events("stop")) == before + 1)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
@pytest.mark.parametrize("route", ROUTES)
def test_empty_stop_strings_are_refused(server: RunningServer, route: str, stop: Any) -> None:  # 4
    answer = getattr(server, route)("hi", stop=stop)
    assert (answer.status, answer.json["error"]["param"]) == (400, "stop")


def test_characters_come_whole(server: RunningServer) -> None:  # 6
    events = server.chat("@say:a🙂안b@", stream=True).events
    pieces = [text_of(choice) for event in events for choice in event["choices"]]
    # Where the machine is busy, several tokens may come together; halves of characters never do.
    assert "".join(pieces) == "a🙂안b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_prefixes_by_length(server: RunningServer) -> None:  # 6
    previous = ""
    for length in range(1, 9):
        text = whole_text(server.chat("@say:a🙂안b@", max_tokens=length).json)
        assert text.removesuffix("\ufffd").startswith(previous.removesuffix("\ufffd"))
        assert "\ufffd" not in text[:-1]
        streamed = check_stream(server.chat("@say:a🙂안b@", max_tokens=length, stream=True).events)
        assert streamed[0] == text
        previous = text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_one_finish_reason(server: RunningServer, route: str, max_tokens: int) -> None:  # 7
    events = getattr(server, route)("hi", max_tokens=max_tokens, stream=True).events
    assert len(check_stream(events)[0]) == max_tokens
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("route", ROUTES)
def test_n_choices(server: RunningServer, route: str) -> None:  # 8, 9
    call = getattr(server, route)
    fields: dict[str, Any] = {"n": 4, "seed": 7, "max_tokens": 12, "temperature": 1}
    whole = call("hi", **fields).json
    streamed = check_stream(call("hi", stream=True, **fields).events, n=4)
    texts = [whole_text(whole, index) for index in range(4)]
    assert [streamed[index] for index in range(4)] == texts
    assert len(set(texts)) == 4
    assert whole_text(call("hi", **{**fields, "n": 1}).json) == texts[0]


def test_unseeded_choices_differ(server: RunningServer) -> None:
    texts = [whole_text(server.chat("hi", max_tokens=16).json) for _ in range(2)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}])
def test_no_usage_unless_asked(server: RunningServer, options: Any) -> None:  # 33
    fields = {} if options == "absent" else {"stream_options": options}
    events = server.chat("hi", max_tokens=3, stream=True, **fields).events
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("route", ROUTES)
def test_usage_chunk(server: RunningServer, route: str) -> None:  # 33, 34
    call = getattr(server, route)
    fields: dict[str, Any] = {"n": 3, "max_tokens": 5, "seed": 1}
    whole = call("hello there", **fields).json["usage"]
    events = call(
        "hello there", stream=True, stream_options={"include_usage": True}, **fields
    ).events
    assert [event["choices"] for event in events if "usage" in event] == [[]]
    usage = events[-1]["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[key] for key in counts] == [whole[key] for key in counts]
    assert usage["completion_tokens"] == 15
    assert usage["total_tokens"] == usage["prompt_tokens"] + 15
    single = call("hello there", max_tokens=5).json["usage"]
    assert single["prompt_tokens"] == usage["prompt_tokens"]


def test_usage_counts_up_to_the_stop(server: RunningServer) -> None:
    answer = server.chat("@say:abcSTOPdefghijkl@", stop="STOP").json
    assert answer["usage"]["completion_tokens"] == len("abcSTOP")


def test_cached_tokens(server: RunningServer) -> None:  # 12
    prompt = "a prompt of its own that is longer than a few pages " * 3
    first = server.chat(prompt, max_tokens=2).json["usage"]
    again = server.chat(prompt, max_tokens=2).json["usage"]
    salted = server.chat(prompt, max_tokens=2, cache_salt="mine").json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_engine_error_ends_a_stream_with_an_error_event(server: RunningServer) -> None:
    answer = server.chat("@fail@@pause:20@", stream=True)
    assert answer.status == 200
    frames = answer.body.decode().strip().split("\n\n")
    assert '"error"' in frames[-1]
    assert "[DONE]" not in answer.body.decode()
    assert server.chat("@fail@@pause:20@").status == 500
    assert server.chat("hi", max_tokens=1).status == 200


def test_event_stream_headers(server: RunningServer) -> None:
    answer = server.chat("hi", max_tokens=1, stream=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert b"\r" not in answer.body
