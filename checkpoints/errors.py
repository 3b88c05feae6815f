"""Errors of the checkpoint readers; `jaxserve.errors` draws the whole tree.

Messages are one line: the file or tensor, what is wrong with it, and the way out.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors about model files."""


class CheckpointNotFoundError(CheckpointError):
    """No such file, folder, name or hub id."""


class CheckpointFormatError(CheckpointError):
    """Truncated, corrupt or contradictory files."""


class DownloadFailedError(CheckpointError):
    """Network, registry or hash trouble."""
