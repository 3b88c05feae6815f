"""Calls of tools out of an answer's text, as it comes (step 9).

A call's name is shown once its header is complete; arguments that are JSON follow as they come, in
the model's own words. What looks like a call and is none stays text. The result does not depend
on how the text was cut into pieces; a whole answer is one piece.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any

from server.openai.tools_formats import MAX_HEADER, ToolFormat
from server.openai.tools_values import ObjectEnd, parse_python

Delta = dict[str, Any]
#: What may stand between a call's arguments and its closing text.
_MAX_TAIL = 256
_ID_SIGNS = string.ascii_letters + string.digits


class CallReader:
    """Reads one answer. Deltas are OpenAI's: `{"content": ...}` or `{"tool_calls": [...]}`.

    names: the tools that there are. parallel: False drops all calls but the first.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self.num_calls = 0
        self._format = form
        self._names = names
        self._parallel = parallel
        self._text = ""  # what is not decided yet
        self._state: Callable[[], bool] = self._before
        self._object = ObjectEnd()
        self._silent = False
        self._out: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What may be shown now."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """What was held back; call once, at the end."""
        if self._state in (self._in_header, self._in_block):
            self._show(self._format.opening + self._text)
        elif self._state == self._in_python:
            self._end_python()
        elif self._state in (self._before, self._plain):
            rest = self._text.rstrip() if self.num_calls else self._text
            self._show(rest)
        self._text = ""
        return self._take()

    def _before(self) -> bool:
        """In text, before an opening."""
        opening = self._format.opening
        if not opening:
            return self._at_start()
        at = self._text.find(opening)
        if at >= 0:
            self._show(self._text[:at].rstrip())
            return self._go(self._in_header, at + len(opening))
        cut = len(self._text) - _begun(self._text, opening)
        cut = len(self._text[:cut].rstrip())
        self._show(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _at_start(self) -> bool:
        """An answer is a call from its first brace on, or text."""
        rest, prefix = self._text.lstrip(), self._format.prefix
        if rest.startswith(prefix):
            rest = rest[len(prefix) :].lstrip()
        elif prefix.startswith(rest):
            return False
        if not rest:
            return False
        if not rest.startswith(self._format.start):
            return self._go(self._plain)
        return self._go(self._in_python if self._format.python else self._in_header)

    def _in_python(self) -> bool:
        """In a list of Python calls: it is read when the answer is complete."""
        return False

    def _end_python(self) -> None:
        text = self._text.strip().removeprefix(self._format.prefix)
        calls = parse_python(text.removesuffix("<|python_end|>"))
        if calls is None or any(name not in self._names for name, _ in calls):
            self._show(self._text)
            return
        for name, arguments in calls:
            self._begin(name)
            self._arguments(arguments)

    def _plain(self) -> bool:
        self._show(self._text)
        self._text = ""
        return False

    def _in_header(self) -> bool:
        text, prefix = self._text, self._format.prefix
        if prefix and text.lstrip().startswith(prefix):
            text = self._text = text.lstrip()[len(prefix) :]
        found = self._format.header.match(text)
        if found is None or found.end() > MAX_HEADER:
            return self._no_header()
        if found[1] not in self._names:
            return self._is_text()
        if self._format.quote is not None:
            return self._go(self._in_block)
        self._begin(found[1])
        self._object = ObjectEnd()
        return self._go(self._in_arguments, found.end())

    def _no_header(self) -> bool:
        """The header is not complete, or the call is written in another order."""
        text, closing = self._text, self._format.closing
        ends = [MAX_HEADER] if len(text) > MAX_HEADER else []
        if closing and closing in text:
            ends.append(text.index(closing))
        brace = text.find("{")
        if self._format.in_object and brace >= 0:
            length = ObjectEnd().feed(text[brace:])
            ends += [] if length is None else [brace + length]
        if not ends:
            return False
        end = min(ends)
        call = _call_object(text[max(brace, 0) : end])
        if not self._format.in_object or call is None or call[0] not in self._names:
            return self._is_text()
        self._begin(call[0])
        self._arguments(call[1])
        self._silent = False
        return self._go(self._after_object, end)

    def _is_text(self) -> bool:
        """What looked like a call is none."""
        self._show(self._format.opening)
        return self._go(self._before if self._format.opening else self._plain)

    def _in_arguments(self) -> bool:
        end = self._object.feed(self._text)
        self._arguments(self._text[:end])
        if end is None:
            self._text = ""
            return False
        self._silent = False
        return self._go(self._after_arguments, end)

    def _after_arguments(self) -> bool:
        """At the brace around name and arguments, if there is one."""
        if not self._format.in_object or self._format.closing:
            return self._go(self._after_object)
        rest = self._text.lstrip()
        if not rest:
            return False
        if not rest.startswith("}"):
            return self._go(self._after_calls)
        return self._go(self._after_object, len(self._text) - len(rest) + 1)

    def _after_object(self) -> bool:
        """At the closing text, or at what stands between calls."""
        form = self._format
        if form.closing:
            at = self._text.find(form.closing)
            if 0 <= at <= _MAX_TAIL:
                return self._go(self._before, at + len(form.closing))
            if len(self._text) <= _MAX_TAIL + len(form.closing):
                return False
            return self._go(self._before)
        rest = self._text.lstrip()
        if not rest and (form.separator or form.list_end):
            return False
        if form.separator and rest.startswith(form.separator):
            after = rest[len(form.separator) :].lstrip()
            if not after:
                return False
            if after.startswith("{"):
                return self._go(self._in_header, len(self._text) - len(after))
        if rest.startswith("{") and not form.opening:
            return self._go(self._in_header, len(self._text) - len(rest))
        if form.list_end and rest.startswith(form.list_end):
            return self._go(self._before, len(self._text) - len(rest) + len(form.list_end))
        return self._go(self._after_calls)

    def _after_calls(self) -> bool:
        return self._go(self._before if self._format.opening else self._plain)

    def _in_block(self) -> bool:
        """In a call whose arguments are not JSON: it is shown when it is complete."""
        form = self._format
        at = self._text.find(form.closing)
        if at < 0:
            return False
        found = form.header.match(self._text)
        assert found is not None
        value = form.arguments(self._text[found.end() : at].strip())
        if value is None:
            return self._is_text()
        self._begin(found[1])
        self._arguments(json.dumps(value, ensure_ascii=False))
        self._silent = False
        return self._go(self._before, at + len(form.closing))

    def _go(self, state: Callable[[], bool], past: int = 0) -> bool:
        self._state, self._text = state, self._text[past:]
        return True

    def _begin(self, name: str) -> None:
        self._silent = bool(self.num_calls) and not self._parallel
        if self._silent:
            return
        call = {
            "index": self.num_calls,
            "id": make_id(self._format.id_length),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self.num_calls += 1
        self._out.append({"tool_calls": [call]})

    def _arguments(self, text: str) -> None:
        if text and not self._silent:
            more = {"index": self.num_calls - 1, "function": {"arguments": text}}
            self._out.append({"tool_calls": [more]})

    def _show(self, text: str) -> None:
        if text:
            self._out.append({"content": text})

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out


def make_id(length: int) -> str:
    """A call's id; Mistral's templates want nine letters and digits."""
    if length < 10:
        return "".join(secrets.choice(_ID_SIGNS) for _ in range(length))
    return "call_" + secrets.token_hex(length // 2)


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _call_object(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON) of an object that has them in any order."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write them as text
        return (name, arguments) if _is_object(arguments) else None
    return (name, json.dumps(arguments, ensure_ascii=False)) if type(arguments) is dict else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
