"""Errors of the ops that a user's settings or shapes can cause; one line with all reasons."""

from __future__ import annotations


class KernelError(Exception):
    """No implementation of an op can do what is asked."""
