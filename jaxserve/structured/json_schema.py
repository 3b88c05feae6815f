"""Which JSON schemas are taken (part of step 1): each keyword is enforced, or the schema is refused.

llguidance refuses what it knows and cannot do, but skips names that it does not know, as JSON
Schema itself asks for; a misspelt `minLenght` would fail open. So names are checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxserve.errors import RequestError

#: Enforced, or refused by llguidance with a reason.
_ENFORCED = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties"}
    | {"patternProperties", "minProperties", "maxProperties", "items", "prefixItems"}
    | {"additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"}
)
#: Known to mean nothing for which texts are valid.
_NOTES = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples"}
    | {"example", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {"contentMediaType", "contentEncoding"}
)
#: Keywords of JSON Schema without support; llguidance would refuse them, too, in other words.
_MISSING = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor"}
    | {"$recursiveRef", "$recursiveAnchor", "contentSchema", "$vocabulary"}
)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")


def check_schema(schema: Any, param: str) -> None:
    """Raises RequestError (param) naming the first keyword that would not be enforced."""
    for where, part in _subschemas(schema):
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise _refused(param, f"{where} is not a schema (an object, true or false)")
        for name, value in part.items():
            _check_keyword(name, value, where, param)


def _check_keyword(name: str, value: Any, where: str, param: str) -> None:
    if name in _ENFORCED or name in _NOTES:
        return
    if name == "nullable":
        if value is not False:
            raise _refused(
                param, f'{where} has "nullable"; write "type": [..., "null"] for what may be null'
            )
        return
    if name in _MISSING:
        raise _refused(param, f"{where} has the keyword {name!r}, which is not supported")
    if name.startswith("x-") and name != "x-guidance":
        return
    raise _refused(
        param,
        f"{where} has {name[:64]!r}, which is no keyword of JSON Schema that this server knows",
    )


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every schema in `schema` with its place as a JSON pointer, itself first."""
    left = [("the schema", schema)]
    while left:
        where, part = left.pop()
        yield where, part
        if not isinstance(part, dict):
            continue
        prefix = "" if where == "the schema" else where
        for name in _OF_NAMES:
            if isinstance(part.get(name), dict):
                left += [(f"{prefix}/{name}/{key[:64]}", it) for key, it in part[name].items()]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                left += [(f"{prefix}/{name}/{at}", it) for at, it in enumerate(part[name])]
        for name in _SINGLE:
            value = part.get(name)
            if isinstance(value, list):  # how older drafts write prefixItems
                left += [(f"{prefix}/{name}/{at}", it) for at, it in enumerate(value)]
            elif name in part:
                left.append((f"{prefix}/{name}", value))


def _refused(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: {what}", param=param, code="invalid_schema")
