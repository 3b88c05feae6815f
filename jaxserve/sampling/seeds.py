"""Seeds of answers (before step 3). Imports no jax: the front end uses it, too."""

from __future__ import annotations

import hashlib
import os


def derive_seed(seed: int | None, index: int) -> int:
    """The seed of answer `index` (from 0) of a request that asks for n answers.

    Answer 0 keeps the request's seed; the others get seeds of their own that depend on (seed,
    index) alone. A request without a seed gets a random one each time. The result lies in
    [-2^63, 2^63), as `SamplingParams.seed` wants it.
    """
    if seed is None:
        return int.from_bytes(os.urandom(8), "little", signed=True)
    if index == 0:
        return seed
    text = f"{seed}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit seed, each in [0, 2^32)."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
