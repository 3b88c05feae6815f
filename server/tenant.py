"""Whose request this is: what one tenant keeps here, another neither sees nor changes.

Two keys of the WSGI environment, which no HTTP client can set, mark what a batch asks for itself.
"""

from __future__ import annotations

import flask

#: Whose request it is, instead of an API key.
TENANT_KEY = "jaxserve.tenant"
#: Set for requests that nobody waits for: they come after those of people.
BACKGROUND_KEY = "jaxserve.background"
#: What is added to their priority; smaller runs earlier.
BACKGROUND_PRIORITY = 1_000_000


def current_tenant() -> str:
    """The tenant's name, which the check of API keys leaves in `flask.g.tenant`; without keys ""."""
    given = flask.request.environ.get(TENANT_KEY)
    return str(flask.g.get("tenant", "") or "" if given is None else given)


def is_background() -> bool:
    """Whether a batch asks, and nobody waits."""
    return bool(flask.request.environ.get(BACKGROUND_KEY))
