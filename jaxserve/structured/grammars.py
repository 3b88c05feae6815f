"""From what a request asks for to a `Grammar` (part of step 1): schemas, expressions, choices, rules.

Grammars are written as llguidance reads them: JSON with a list of grammars, the first of which
is where an answer begins. Whether they can be enforced is tried in `check`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured.json_schema import check_schema
from jaxserve.structured.limits import MAX_CHOICES, MAX_SOURCE_BYTES

#: White space at each place where JSON allows it: one run, so that no model can stay in it.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
_OPTIONS = {"whitespace_pattern": WHITE_SPACE}


def schema_grammar(schema: Any, param: str) -> Grammar:
    """JSON that is valid for `schema`. Raises RequestError (param) naming what cannot be enforced."""
    return _grammar([{"json_schema": json_part(schema, param)}], param)


def object_grammar(param: str) -> Grammar:
    """Any JSON object."""
    return schema_grammar({"type": "object"}, param)


def json_part(schema: Any, param: str) -> dict[str, Any]:
    """`schema` as llguidance's `%json` takes it, with our bounds on white space.

    Raises RequestError (param).
    """
    _check_size(json.dumps(schema), param)
    check_schema(schema, param)
    if schema is False:
        raise RequestError(f"{param}: nothing is valid for the schema false", param=param)
    return {"x-guidance": _OPTIONS, **({} if schema is True else schema)}


def regex_grammar(pattern: str, param: str) -> Grammar:
    r"""Texts that `pattern` matches as a whole, in the syntax of Rust's regex crate; `\d` is 0-9."""
    _check_size(pattern, param)
    return lark_grammar(f"start: /{regex_to_lark(pattern, 'd')}/", param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Exactly one of `choices`."""
    if not choices:
        raise RequestError(f"{param} must hold at least one text", param=param)
    if len(choices) > MAX_CHOICES:
        raise RequestError(
            f"{param} holds {len(choices)} texts; at most {MAX_CHOICES} are taken", param=param
        )
    if not all(choices):
        raise RequestError(f"{param} must not hold an empty text", param=param)
    _check_size("".join(choices), param)
    return lark_grammar("start: " + " | ".join(quoted(text) for text in choices), param)


def text_grammar(text: str, param: str) -> Grammar:
    """A grammar that a user wrote: in Lark's syntax, or in EBNF as llama.cpp has it (GBNF)."""
    _check_size(text, param)
    if "x-guidance" in text:  # could switch a schema's checks off
        raise RequestError(f"{param}: x-guidance is not taken", param=param, code="invalid_grammar")
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise _bad(param, "it is nested too deeply") from None
    except Exception as error:  # whatever foreign code may raise
        raise _bad(param, f"it is neither Lark nor EBNF: {error}") from None
    return lark_grammar(lark, param)


def lark_grammar(lark: str, param: str) -> Grammar:
    """A grammar in llguidance's dialect of Lark."""
    return _grammar([{"lark_grammar": lark}], param)


def after_text(grammar: Grammar, closing: str, *, opening: str | None = None) -> Grammar:
    """Any text up to the first `closing`, then white space, then what `grammar` says.

    For models that think before they answer; opening and closing are Lark: quoted texts or special
    tokens. opening: what the thoughts begin with, if there are any; None where they have begun.
    """
    parts = json.loads(grammar.text)["grammars"]
    parts[0] = {**parts[0], "name": "the_answer"}
    if closing.startswith("<"):
        before = f"before: /(?s:.*)/ {closing}"
    else:
        before = f"before[lazy]: /(?s:.*)/ {closing}"
    first = "before space" if opening is None else f"({opening} before space)?"
    lark = f"start: {first} @the_answer\n{before}\nspace: /[ \\n]{{0,4}}/\n"
    return _grammar([{"lark_grammar": lark}, *parts], grammar.param)


def quoted(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _grammar(parts: list[dict[str, Any]], param: str) -> Grammar:
    return Grammar(text=json.dumps({"grammars": parts}, ensure_ascii=False), param=param)


def _check_size(source: str, param: str) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise RequestError(
            f"{param} has {size} bytes; at most {MAX_SOURCE_BYTES} are taken", param=param
        )


def _bad(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param, code="invalid_grammar")
