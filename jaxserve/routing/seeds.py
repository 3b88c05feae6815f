"""Seeds of a request's choices (part of step 3). Pure integer arithmetic, no jax."""

from __future__ import annotations

import os

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def random_seed() -> int:
    """A fresh seed for a request that named none, as a signed 64-bit number."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`; choice 0 keeps the seed itself.

    SplitMix64 (Steele, Lea, Flood 2014) of seed + index steps, so that the seeds of two choices,
    and of two neighbouring requests, have nothing in common. Signed 64-bit in and out.
    """
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
