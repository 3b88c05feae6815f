"""Counter-based random numbers for sampling (step 7).

The noise of token v in a row is a function of (seed, position, v) and of nothing else: not of the
row's place, the batch's size, the vocabulary's padding or the number of devices. Two words per row
come from Threefry-2x32 (`jax.extend.random`, 20 rounds) with the 64-bit seed as key and the
position as counter; a multiply-xorshift hash keyed by both words spreads them over the vocabulary,
which costs a quarter of what Threefry costs per token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

# Constants of the 32-bit mixer "lowbias32" (Wellons, hash-prospector).
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of 32-bit words that spreads every input bit over all output bits."""
    word = (word ^ (word >> 16)) * jnp.uint32(_MULTIPLY_1)
    word = (word ^ (word >> 15)) * jnp.uint32(_MULTIPLY_2)
    return word ^ (word >> 16)


def row_keys(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two words per row, [R, 2] uint32, from seed [R, 2] uint32 (low, high) and position [R] int32."""

    def one(key: jax.Array, count: jax.Array) -> jax.Array:
        words: jax.Array = threefry_2x32(key, jnp.stack([count, jnp.uint32(0)]))
        return words

    return jax.vmap(one)(seed, position.astype(jnp.uint32))


def random_bits(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """[R, size] uint32, uniform; seed [R, 2] uint32, position [R] int32."""
    keys = row_keys(seed, position)
    tokens = jnp.arange(size, dtype=jnp.uint32)[None, :]
    return _mix(_mix(tokens + keys[:, :1]) ^ keys[:, 1:])


def exponential(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """[R, size] float32 draws of the unit exponential distribution, all above 0 and finite.

    Small values decide which token wins, so they are drawn with 31 bits: the smallest is 2^-32.
    """
    bits = (random_bits(seed, position, size) >> 1).astype(jnp.int32)
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-31
    return -jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24))


def gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """[R, size] float32 Gumbel noise: argmax(logits + gumbel) is a draw from softmax(logits)."""
    return -jnp.log(exponential(seed, position, size))
