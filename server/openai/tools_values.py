"""Values inside calls of tools: where a JSON object ends, and Gemma's notation of arguments (step 9)."""

from __future__ import annotations

import ast
import json
from typing import Any

_MAX_DEPTH = 64
_MAX_PYTHON = 65_536
_JSON_WORDS = {"true": True, "false": False, "null": None}


class ObjectEnd:
    """Finds the end of a JSON object that comes in pieces; the first character is its brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the object if it ends there, else None."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class _NotGemmaError(ValueError):
    """The text is not in Gemma's notation."""


def parse_braces(text: str, quote: str) -> dict[str, Any] | None:
    """`{key:<quote>text<quote>,n:42,list:[...],inner:{...}}` as an object, None if it is something else.

    Keys may be quoted, too; what is neither quoted nor JSON is text.
    """
    try:
        value, end = _value(text, 0, quote, 0)
    except _NotGemmaError:
        return None
    return value if isinstance(value, dict) and not text[end:].strip() else None


def _value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if depth > _MAX_DEPTH or at >= len(text):
        raise _NotGemmaError
    if text.startswith(quote, at):
        return _quoted(text, at, quote)
    if text[at] == "{":
        return _object(text, at + 1, quote, depth)
    if text[at] == "[":
        return _list(text, at + 1, quote, depth)
    return _bare(text, at)


def _object(text: str, at: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text.startswith("}", at):
            return found, at + 1
        if text.startswith(quote, at):
            key, at = _quoted(text, at, quote)
            at = _skip(text, at)
        else:
            end = text.find(":", at)
            key, at = text[at:end].strip().strip('"'), end
        if at < 0 or not key or not text.startswith(":", at):
            raise _NotGemmaError
        found[key], at = _value(text, at + 1, quote, depth + 1)
        at = _next(text, at, "}")


def _list(text: str, at: int, quote: str, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        at = _skip(text, at)
        if text.startswith("]", at):
            return found, at + 1
        item, at = _value(text, at, quote, depth + 1)
        found.append(item)
        at = _next(text, at, "]")


def _next(text: str, at: int, end: str) -> int:
    """Past a comma, or at the end of the object or list."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(end, at):
        raise _NotGemmaError
    return at


def _quoted(text: str, at: int, quote: str) -> tuple[str, int]:
    start = at + len(quote)
    end = text.find(quote, start)
    if end < 0:
        raise _NotGemmaError
    return text[start:end], end + len(quote)


def _bare(text: str, at: int) -> tuple[Any, int]:
    """A number, true, false, null, a JSON string, or text up to the next sign."""
    if text[at] == '"':
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            raise _NotGemmaError from None
        return value, end
    end = at
    while end < len(text) and text[end] not in ",}]":
        end += 1
    word = text[at:end].strip()
    if not word:
        raise _NotGemmaError
    try:
        return json.loads(word, parse_constant=_refuse), end
    except ValueError:
        return word, end


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN is no JSON


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def parse_python(text: str) -> list[tuple[str, str]] | None:
    """`[f(x=1), g()]` as names and arguments (JSON); None if it is something else."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = [_python_call(item) for item in getattr(tree, "elts", ())]
        return calls if isinstance(tree, ast.List) and calls else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(item: ast.expr) -> tuple[str, str]:
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError(item)
    arguments = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise ValueError(item)
        value = keyword.value
        word = _JSON_WORDS.get(value.id, value) if isinstance(value, ast.Name) else value
        arguments[keyword.arg] = ast.literal_eval(word) if isinstance(word, ast.expr) else word
    return ast.unparse(item.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
