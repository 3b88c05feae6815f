"""Whose request this is: what one tenant keeps here, another neither sees nor changes."""

from __future__ import annotations

import flask


def current_tenant() -> str:
    """The tenant's name, which the check of API keys leaves in `flask.g.tenant`; without keys ""."""
    return str(flask.g.get("tenant", "") or "")
