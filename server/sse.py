"""Step 9: framing of Server-Sent Events, in exactly one place.

An event is `data: `, one JSON object, and an empty line, with LF only; some have a name before it. A stream's text events
differ in nothing but their text: `TextEvent` writes the rest of the object once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flask
import msgspec

_encode = msgspec.json.Encoder().encode
_HEAD, _TAIL = b"data: ", b"\n\n"
#: Stands for the text while the rest of an object is encoded.
TEXT_HERE = "\x00text\x00"
_MARK = _encode(TEXT_HERE)

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that holds `value` as JSON."""
    return b"".join((_HEAD, _encode(value), _TAIL))


def named_event(name: str, value: Any) -> bytes:
    """One event that also has a name, as Anthropic's API and OpenAI's responses send them."""
    return b"".join((b"event: ", name.encode(), b"\n", _HEAD, _encode(value), _TAIL))


class TextEvent:
    """Events made of `value`, in which the last TEXT_HERE is replaced by a text."""

    def __init__(self, value: Any, *, name: str | None = None) -> None:
        whole = event(value) if name is None else named_event(name, value)
        before, mark, after = whole.rpartition(_MARK)
        assert mark, "the object has no place for the text"
        self._before, self._after = before, after

    def __call__(self, text: str) -> bytes:
        return b"".join((self._before, _encode(text), self._after))


def event_stream(events: Iterator[bytes]) -> flask.Response:
    """An answer that sends `events` as they come, past every cache and buffer."""
    return _EventStream(
        events,
        mimetype="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        direct_passthrough=True,
    )


class _EventStream(flask.Response):
    """Hands its events through as they are, and still does at its end what `call_on_close` says."""

    def get_app_iter(self, environ: Any) -> Any:
        """What the WSGI server iterates over, and closes whatever happens."""
        return _Closing(super().get_app_iter(environ), self.close)


class _Closing:
    """An iterable that costs nothing per item: its iterator is the original one's."""

    def __init__(self, items: Iterable[bytes], close: Callable[[], None]) -> None:
        self._items = items
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items)
