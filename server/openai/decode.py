"""From the bytes of a body to its checked struct; every complaint names the field (step 1)."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, TypeVar

import msgspec

from jaxserve.errors import RequestError
from server.openai.schema import Body

AnyBody = TypeVar("AnyBody", bound=Body)

#: Fields of whole numbers; clients of other languages may send 12.0.
_WHOLE = frozenset(
    {"max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "seed", "top_k"}
    | {"logprobs", "top_logprobs", "stop_token_ids", "allowed_token_ids", "prompt", "tokens"}
    | {"truncate_prompt_tokens", "priority", "prompt_logprobs", "input", "dimensions"}
    | {"max_output_tokens"}
)
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.S)
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.S)
_MISSING = re.compile(r"missing required field `(.*)`", re.S)
_MAX_NAME = 64
#: Objects in one body; messages, their parts and schemas have far fewer.
_MAX_OBJECTS = 20_000
#: Digits of a number; none that means anything has as many.
_MAX_DIGITS = 100


def decode_body(data: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body as a `kind`. Raises RequestError."""
    raw = decode_object(data)
    _refuse_unknown(raw, kind)
    for name in _WHOLE & raw.keys():
        raw[name] = _whole(raw[name])
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def decode_object(data: bytes) -> dict[str, Any]:
    """The body as an object, in which no key comes twice. Raises RequestError."""
    try:
        raw = msgspec.json.decode(data)
        _check_objects(data)
    except msgspec.ValidationError:  # the only one without a type to check against
        raise _out_of_range(data) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return raw


def _check_objects(data: bytes) -> None:
    """Refuses keys that come twice: clients and servers differ in which of the two they mean."""
    left = _MAX_OBJECTS

    def check(pairs: list[tuple[str, Any]]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RequestError(
                f"the body holds more than {_MAX_OBJECTS} objects", code="invalid_json"
            )
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)[:_MAX_NAME]
            raise RequestError(
                f"the key {twice!r} comes twice in one object", param=twice, code="duplicate_key"
            )

    json.loads(data, object_pairs_hook=check, parse_int=len, parse_float=len)


def _out_of_range(data: bytes) -> RequestError:
    """Which field holds a number that no computer takes."""

    def too_large(text: str) -> bool:
        return len(text) > _MAX_DIGITS or float(text) in (float("inf"), float("-inf"))

    def mark(text: str) -> object:
        return bad if too_large(text) else None

    def holds(value: Any) -> bool:
        if isinstance(value, dict | list):
            return any(map(holds, value.values() if isinstance(value, dict) else value))
        return value is bad

    bad = object()
    found = json.loads(data, parse_int=mark, parse_float=mark)
    names = [name for name, value in found.items() if holds(value)] if type(found) is dict else []
    where = names[0][:_MAX_NAME] if names else None
    return RequestError(
        f"{where or 'the body'}: a number is out of range", param=where, code="invalid_value"
    )


def _refuse_unknown(raw: dict[str, Any], kind: type[Body]) -> None:
    known = kind.__struct_fields__
    unknown = [name for name in raw if name not in known]
    if not unknown:
        return
    shown = [repr(name[:_MAX_NAME]) for name in unknown[:8]]
    close = difflib.get_close_matches(unknown[0][:_MAX_NAME], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise RequestError(
        f"unknown parameter{'s' if len(unknown) > 1 else ''} {', '.join(shown)}{hint}",
        param=unknown[0][:_MAX_NAME],
        code="unknown_parameter",
    )


def _whole(value: Any) -> Any:
    """12.0 becomes 12, also inside lists; everything else stays for the type check."""
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if type(value) is list:
        return [_whole(item) for item in value]
    return value


def _explain(text: str) -> RequestError:
    """`Expected int >= 1 - at `$.max_tokens`` names the field max_tokens."""
    where, code = "", "invalid_type"
    at = _AT.search(text)
    if at is not None:
        where, text = at[1], text[: at.start()]
    for pattern, kind in ((_UNKNOWN, "unknown_parameter"), (_MISSING, "missing_parameter")):
        found = pattern.search(text)
        if found is not None:
            where, code = ".".join(filter(None, (where, found[1][:_MAX_NAME]))), kind
    param = where if code == "unknown_parameter" else re.split(r"[.\[]", where)[0]
    text = text[:1].lower() + text[1:]
    return RequestError(f"{where}: {text}" if where else text, param=param or None, code=code)
