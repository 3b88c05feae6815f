"""Closes every route but /health and /ready to those without a key, once there are keys.

Runs before a route is even looked for, so an unknown path tells a stranger nothing, either. The
refusal has the shape of the API that was asked: it is an exception like any other.
"""

from __future__ import annotations

import dataclasses

import flask

from jaxserve.errors import AccessError
from server.access.keyfile import Tenant
from server.access.keyring import KeyRing
from server.tenant import TENANT_KEY

OPEN_PATHS = frozenset(("/health", "/ready"))
#: Longer ones are none of ours.
_MAX_KEY = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. Without keys everybody is the one tenant "", who may see everything."""

    name: str = ""
    tenant: Tenant = dataclasses.field(default_factory=lambda: Tenant(admin=True))


class Gate:
    """keys: None for a server that is open to everybody."""

    def __init__(self, keys: KeyRing | None) -> None:
        self._keys = keys

    @property
    def closed(self) -> bool:
        """Whether keys are asked for."""
        return self._keys is not None

    def check(self) -> None:
        """Lets the current request through as somebody. Raises AccessError."""
        given = flask.request.environ.get(TENANT_KEY)
        if self._keys is None:
            flask.g.caller = Caller(name=str(given or ""))
        elif flask.request.path in OPEN_PATHS:
            flask.g.caller = Caller(tenant=Tenant())
        else:
            name = self._find(self._keys) if given is None else str(given)
            tenant = None if name is None else self._keys.tenant(name)
            if name is None or tenant is None:
                raise AccessError(
                    "this API key is not known here; it may be wrong or revoked",
                    code="invalid_api_key",
                )
            flask.g.caller = Caller(name=name, tenant=tenant)
        flask.g.tenant = flask.g.caller.name

    def _find(self, keys: KeyRing) -> str | None:
        given = {key for key in (_bearer(), flask.request.headers.get("X-Api-Key", "")) if key}
        if not given:
            raise AccessError(
                "no API key was sent; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="missing_api_key",
            )
        if len(given) > 1 or len(min(given)) > _MAX_KEY:
            return None
        return keys.find(given.pop())


def current_caller() -> Caller:
    """Who asks now; in a request only."""
    caller: Caller = flask.g.caller
    return caller


def check_admin(what: str) -> None:
    """Raises AccessError unless an admin asks."""
    if not current_caller().tenant.admin:
        raise AccessError(f"{what} needs an admin's key", code="not_allowed", status=403)


def _bearer() -> str:
    """The key of the Authorization header: a bearer's, or a browser's, where it is the password.

    Browsers send that by themselves, so what another site makes them send counts for nothing.
    """
    scheme, _, key = flask.request.headers.get("Authorization", "").strip().partition(" ")
    basic = flask.request.authorization
    if scheme.lower() == "basic" and basic is not None:
        own = flask.request.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
        return basic.password or "" if own else ""
    return key.strip() if scheme.lower() == "bearer" else ""
