"""Finding the top-k and top-p sets by bisection on bit patterns (step 7).

Every filter keeps the tokens nearest to the top, so it is one bound on the distance
d = (max - logit) / temperature. Non-negative float32 numbers order like their bit patterns read as
integers, so a bound is found by halving 31 bits: 31 passes that count or sum, exact for any values.
The passes run over the best blocks of the vocabulary first; only if some row's bound reaches
beyond them they run over everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sample.blocks import BLOCK, top_blocks

INFINITY_BITS = 0x7F800000
#: exp(-d) is 0 in float32 from this distance on.
_NO_MASS_BITS = int(np.float32(104.0).view(np.int32))
_NEAR_BLOCKS = 128


class Wanted(NamedTuple):
    """What the rows ask for, [R] each: top_k int32 (0: off) and top_p float32 (1: off)."""

    top_k: jax.Array
    top_p: jax.Array


class Bounds(NamedTuple):
    """What stays, [R] int32 each: distances up to `bound` (bits), less `drop` of those equal to it."""

    bound: jax.Array
    drop: jax.Array


def to_bits(values: jax.Array) -> jax.Array:
    """The bit patterns of float32 values as int32: ordered like the values where those are >= 0."""
    return lax.bitcast_convert_type(values, jnp.int32)


def mass_of(distance: jax.Array) -> jax.Array:
    """exp(-d), the probability relative to the likeliest token; distance: int32 bits."""
    return jnp.exp(-lax.bitcast_convert_type(distance, jnp.float32))


def bisect(
    low: jax.Array, high: jax.Array, holds: Callable[[jax.Array], jax.Array], steps: int
) -> jax.Array:
    """The largest integer per row for which `holds`; it holds at low, not at high, and changes once.

    low and high: [R] int32, high - low below 2^steps; `holds` maps [R] int32 to [R] bool.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        right = holds(middle) & (middle > low)
        return jnp.where(right, middle, low), jnp.where(right | (middle == low), high, middle)

    found: jax.Array = lax.fori_loop(0, steps, halve, (low, high))[0]
    return found


def nth_id(chosen: jax.Array, number: jax.Array) -> jax.Array:
    """[R] int32: the id of the number-th (from 1) True in each row of chosen [R, V]."""
    vocab = chosen.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)

    def fewer(bound: jax.Array) -> jax.Array:
        before = jnp.sum(chosen & (ids < bound[:, None]), axis=1, dtype=jnp.int32)
        return before < number

    low = jnp.zeros_like(number)
    return bisect(low, jnp.full_like(low, vocab), fewer, vocab.bit_length())


def find_bounds(distance: jax.Array, bound: jax.Array, wanted: Wanted) -> Bounds:
    """Narrows bound [R] int32 bits by top-k, then top-p; distance: [R, V] int32 bits, V in blocks."""
    if distance.shape[1] // BLOCK <= _NEAR_BLOCKS:
        return _search(distance, jnp.zeros_like, bound, wanted)[1]
    near = top_blocks(-lax.bitcast_convert_type(distance, jnp.float32), _NEAR_BLOCKS)
    reach = to_bits(-near.rest)  # everything nearer than this is in the near blocks

    def far_mass(bound: jax.Array) -> jax.Array:
        mass = jnp.where(distance <= bound[:, None], mass_of(distance), 0.0)
        per_block = mass.reshape(mass.shape[0], -1, BLOCK).sum(2)
        rows = jnp.arange(mass.shape[0])[:, None]
        return per_block.at[rows, near.ids].set(0.0).sum(1)

    after_k, found = _search(to_bits(-near.values), far_mass, bound, wanted)
    missed = (wanted.top_k > 0) & (after_k >= reach)
    missed |= (wanted.top_p < 1.0) & (found.bound >= reach)
    result: Bounds = lax.cond(
        jnp.any(missed),
        lambda: _search(distance, jnp.zeros_like, bound, wanted)[1],
        lambda: found,
    )
    return result


def _search(
    distance: jax.Array,
    far_mass: Callable[[jax.Array], jax.Array],
    bound: jax.Array,
    wanted: Wanted,
) -> tuple[jax.Array, Bounds]:
    """The bound after top-k alone, and the bounds after both.

    distance: [R, M] int32 bits; far_mass(bound) is the mass [R] within bound that lies outside.
    """
    bound = lax.cond(
        jnp.any(wanted.top_k > 0),
        lambda: jnp.minimum(bound, _top_k(distance, wanted.top_k)),
        lambda: bound,
    )
    found: Bounds = lax.cond(
        jnp.any(wanted.top_p < 1.0),
        lambda: _top_p(distance, far_mass(bound), bound, wanted.top_p),
        lambda: Bounds(bound, jnp.zeros_like(bound)),
    )
    return bound, found


def _top_k(distance: jax.Array, top_k: jax.Array) -> jax.Array:
    """[R] int32: bits of the k-th smallest distance; of infinity where top_k is 0."""

    def fewer(bound: jax.Array) -> jax.Array:
        return jnp.sum(distance < bound[:, None], axis=1, dtype=jnp.int32) < top_k

    low = jnp.zeros_like(top_k)
    kth = bisect(low, jnp.full_like(low, INFINITY_BITS), fewer, 31)
    return jnp.where(top_k > 0, kth, INFINITY_BITS)


def _top_p(distance: jax.Array, far_mass: jax.Array, bound: jax.Array, top_p: jax.Array) -> Bounds:
    """The top-p set of what lies within bound; rows with top_p 1 keep their bound."""
    mass = jnp.where(distance <= bound[:, None], mass_of(distance), 0.0)

    def total(part: jax.Array) -> jax.Array:
        # Two short sums instead of a long one: float32 keeps seven digits.
        return part.reshape(part.shape[0], BLOCK, -1).sum(1).sum(1) + far_mass

    limit = (1.0 - top_p) * total(mass)

    def stays(value: jax.Array) -> jax.Array:
        return total(jnp.where(distance >= value[:, None], mass, 0.0)) > limit

    cut = bisect(jnp.zeros_like(bound), jnp.full_like(bound, _NO_MASS_BITS), stays, 31)
    count = jnp.sum(distance == cut[:, None], axis=1, dtype=jnp.int32)
    below = total(jnp.where(distance > cut[:, None], mass, 0.0))
    drop = jnp.clip(jnp.floor((limit - below) / mass_of(cut)), 0, count - 1).astype(jnp.int32)
    used = top_p < 1.0
    return Bounds(jnp.where(used, cut, bound), jnp.where(used, drop, 0))
