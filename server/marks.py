"""Moments of the current HTTP request, noted for its trace by the steps that come before the engine."""

from __future__ import annotations

import time

import flask


def mark(name: str, moment: float | None = None) -> None:
    """Notes that a step is done, now or at `moment`. Outside of a request nothing is noted."""
    if flask.has_request_context():
        flask.g.marks.append((name, time.monotonic() if moment is None else moment))
