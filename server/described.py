"""What /openapi.json says of a route beyond its path and its docstring, noted where the route is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from server.openai.fields import Refusals
from server.openai.schema import Body

View = TypeVar("View", bound=Callable[..., Any])
Json = dict[str, Any]
_ATTRIBUTE = "jaxserve_description"
JSON, EVENTS, TEXT, BYTES = (
    "application/json",
    "text/event-stream",
    "text/plain",
    "application/octet-stream",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """body: the struct that the route reads its JSON body into; refusals: its fields without use.

    form: schema of a multipart form instead. query: parameters with their schemas. answers: content
    types of a 200. optional_body: the body may be left out.
    """

    body: type[Body] | None = None
    refusals: Refusals = dataclasses.field(default_factory=dict)
    form: Json | None = None
    query: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    answers: tuple[str, ...] = (JSON,)


def described(description: Description) -> Callable[[View], View]:
    """Notes `description` at a view."""

    def note(view: View) -> View:
        setattr(view, _ATTRIBUTE, description)
        return view

    return note


def description_of(view: Callable[..., Any]) -> Description:
    """What was noted; of a view without a note, nothing."""
    found: Description = getattr(view, _ATTRIBUTE, Description())
    return found
