"""Whatever a model writes, its events are read back as they were sent, however the bytes are cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from server import sse

#: What ends lines somewhere, what JSON escapes, what has two to four bytes, and the frame's own words.
ODD = [
    *'\n\r\t\0\x0b\x0c\x1c\x85\u2028\u2029\ufeff\ufffd\u200d"\\/:',
    *("\r\n", "\n\n", "data: ", "event: x\n", "[DONE]", "🙂", "안", "ü", sse.TEXT_HERE, "\\u0000"),
]
TEXTS = st.lists(st.text(max_size=8) | st.sampled_from(ODD), max_size=6).map("".join)
NAMES = st.none() | st.from_regex(r"[a-z_.]{1,30}", fullmatch=True)


def read(data: bytes) -> list[tuple[str | None, str]]:
    """Name and data of every event, by the rules of the HTML standard: LF, CR and CR LF end lines."""
    text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    assert text.endswith("\n\n"), "the last event is complete"
    found = []
    for frame in text[:-2].split("\n\n"):
        name, parts = None, []
        for line in frame.split("\n"):
            field, _, value = line.partition(": ")
            assert field in ("event", "data"), frame
            if field == "event":
                assert name is None
                name = value
            else:
                parts.append(value)
        found.append((name, "\n".join(parts)))
    return found


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The same bytes in several reads; also in the middle of a character."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return (data[start:end] for start, end in itertools.pairwise(places))


def frames(texts: list[str], name: str | None) -> tuple[bytes, list[Any]]:
    """A stream in which each text is sent both ways, and the objects that it holds."""
    body: dict[str, Any] = {"id": "x", "delta": {"content": sse.TEXT_HERE}, "index": 0}
    text_event = sse.TextEvent(body, name=name)
    data, values = b"", []
    for text in texts:
        value = {**body, "delta": {"content": text}}
        whole = sse.event(value) if name is None else sse.named_event(name, value)
        assert text_event(text) == whole, "the two ways write the same"
        data += whole + text_event(text)
        values += [value, value]
    return data + sse.DONE, values


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4), NAMES, st.lists(st.integers(0, 10_000), max_size=8))
def test_any_text_comes_back(texts: list[str], name: str | None, cuts: list[int]) -> None:
    data, values = frames(texts, name)
    *events, done = read(data)
    assert done == (None, "[DONE]")
    assert [each[0] for each in events] == [name] * len(values)
    assert [json.loads(each[1]) for each in events] == values
    theirs = list(SSEDecoder().iter_bytes(pieces(data, cuts)))
    assert [json.loads(each.data) for each in theirs[:-1]] == values
    assert theirs[-1].data == "[DONE]"


def test_a_frame_is_one_line_of_json() -> None:
    """Nothing in a text can end a line or an event, so nobody can write an event of their own."""
    for odd in ODD:
        data, _ = frames([odd], None)
        assert data.count(b"\n") == 6
        assert b"\r" not in data
        assert b"\0" not in data
