"""Content hashes of full pages: the keys of the prefix cache.

A page's hash covers its own tokens and, through its parent's hash, everything before it, so equal
hashes mean equal prefixes. The salt starts the chain: requests with other salts never share.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def chain_start(salt: str) -> bytes:
    """The parent hash of a sequence's first page."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"jaxserve-prefix").digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash (16 bytes) of one full page that follows `parent`."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16, key=parent).digest()
