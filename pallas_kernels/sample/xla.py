"""Exact filtering and sampling without sorting the vocabulary, for every platform (step 7).

Every filter keeps the tokens nearest to the top, so it is one bound on the distance
d = (max - logit) / temperature. Non-negative float32 numbers order like their bit patterns read as
integers, so the k-th smallest distance and the top-p bound are found by bisection over 31 bits:
31 passes that count or sum, whatever the vocabulary and the values. Filters that no row uses are
skipped, and a batch of greedy rows draws no random numbers. Definition: `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sample import noise
from pallas_kernels.sample.reference import is_greedy

_INFINITY_BITS = 0x7F800000
#: exp(-d) is 0 in float32 from this distance on.
_NO_MASS_BITS = int(np.float32(104.0).view(np.int32))


def _bits(values: jax.Array) -> jax.Array:
    """The bit patterns of float32 values as int32: ordered like the values where those are >= 0."""
    return lax.bitcast_convert_type(values, jnp.int32)


def _bisect(
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


def _top_k_bound(distance: jax.Array, top_k: jax.Array) -> jax.Array:
    """[R] int32: bits of the k-th smallest distance; of infinity where top_k is off."""
    vocab = distance.shape[1]
    wanted = jnp.where((top_k <= 0) | (top_k >= vocab), vocab, top_k)
    low = jnp.zeros_like(wanted)

    def fewer(bound: jax.Array) -> jax.Array:
        return jnp.sum(distance < bound[:, None], axis=1, dtype=jnp.int32) < wanted

    kth = _bisect(low, jnp.full_like(low, _INFINITY_BITS), fewer, 31)
    return jnp.where(wanted == vocab, _INFINITY_BITS, kth)


def _nth_id(chosen: jax.Array, number: jax.Array) -> jax.Array:
    """[R] int32: the id of the number-th (from 1) True in each row of chosen [R, V]."""
    vocab = chosen.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)

    def fewer(bound: jax.Array) -> jax.Array:
        before = jnp.sum(chosen & (ids < bound[:, None]), axis=1, dtype=jnp.int32)
        return before < number

    low = jnp.zeros_like(number)
    return _bisect(low, jnp.full_like(low, vocab), fewer, vocab.bit_length())


class _Support(NamedTuple):
    """What stays, per row: distances below `bound`, and those equal to it with ids first to last.

    All [R] int32; bound is the bit pattern of a distance.
    """

    bound: jax.Array
    first: jax.Array
    last: jax.Array


def _top_p(distance: jax.Array, support: _Support, top_p: jax.Array) -> _Support:
    """The top-p set of what lies within support's bound; distance: [R, V] int32 bits."""
    bound = support.bound
    mass = jnp.exp(-lax.bitcast_convert_type(distance, jnp.float32))
    mass = jnp.where(distance <= bound[:, None], mass, 0.0)
    limit = (1.0 - top_p) * mass.sum(1)

    def stays(value: jax.Array) -> jax.Array:
        return jnp.where(distance >= value[:, None], mass, 0.0).sum(1) > limit

    cut = _bisect(jnp.zeros_like(bound), jnp.full_like(bound, _NO_MASS_BITS), stays, 31)
    tied = distance == cut[:, None]
    count = jnp.sum(tied, axis=1, dtype=jnp.int32)
    each = jnp.exp(-lax.bitcast_convert_type(cut, jnp.float32))
    below = jnp.where(distance > cut[:, None], mass, 0.0).sum(1)
    drop = jnp.clip(jnp.floor((limit - below) / each), 0, count - 1).astype(jnp.int32)
    used = top_p < 1.0
    narrowed = support._replace(bound=jnp.where(used, cut, bound))

    def split_ties() -> _Support:
        at_top = cut == 0
        edge = _nth_id(tied, jnp.where(at_top, count - drop, drop + 1))
        return narrowed._replace(
            first=jnp.where(used & ~at_top, edge, support.first),
            last=jnp.where(used & at_top, edge, support.last),
        )

    result: _Support = lax.cond(jnp.any(used & (drop > 0)), split_ties, lambda: narrowed)
    return result


def _first_of_largest(logits: jax.Array, top: jax.Array) -> jax.Array:
    """[R] int32: the lowest id whose logit equals top [R]; 0 where none does."""
    vocab = logits.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == top[:, None], ids, vocab), axis=1)
    return jnp.where(first == vocab, 0, first)


def filtered_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """Scaled logits [R, V] float32, -inf outside the support; as `reference.filtered_logits`."""
    return _filtered(logits, logits.max(1), temperature, top_k, top_p, min_p)


def _filtered(
    logits: jax.Array,
    top: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    vocab = logits.shape[1]
    greedy = is_greedy(temperature, top_k, min_p)
    difference = (top[:, None] - logits) / jnp.where(greedy, 1.0, temperature)[:, None]
    distance = _bits(difference)
    bound = _bits(jnp.abs(jnp.log(jnp.clip(min_p, 0.0, 1.0))))
    bound = lax.cond(
        jnp.any((top_k > 0) & (top_k < vocab) & ~greedy),
        lambda: jnp.minimum(bound, _top_k_bound(distance, top_k)),
        lambda: bound,
    )
    support = _Support(bound, jnp.zeros_like(bound), jnp.full_like(bound, vocab))
    support = lax.cond(
        jnp.any((top_p < 1.0) & ~greedy),
        lambda: _top_p(distance, support, top_p),
        lambda: support,
    )

    def take_largest() -> _Support:
        largest = _first_of_largest(logits, top)
        only = _Support(jnp.zeros_like(bound), largest, largest)
        return _Support(*(jnp.where(greedy, a, b) for a, b in zip(only, support, strict=True)))

    support = lax.cond(jnp.any(greedy), take_largest, lambda: support)
    bound, first, last = (field[:, None] for field in support)
    ids = jnp.arange(vocab, dtype=jnp.int32)
    at_bound = (distance == bound) & (ids >= first) & (ids <= last)
    return jnp.where((distance < bound) | at_bound, -difference, -jnp.inf)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token per row [R] int32 and ok [R] bool; as `reference.sample`."""
    top = logits.max(1)
    ok = jnp.isfinite(top)

    def draw() -> jax.Array:
        kept = _filtered(logits, top, temperature, top_k, top_p, min_p)
        noisy = kept + noise.gumbel(seed, position, logits.shape[1])
        return _first_of_largest(noisy, noisy.max(1))

    tokens = lax.cond(
        jnp.all(is_greedy(temperature, top_k, min_p)),
        lambda: _first_of_largest(logits, top),
        draw,
    )
    return tokens, ok


def top_logprobs(
    logits: jax.Array, tokens: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of `tokens` and of the `count` likeliest; as `reference.top_logprobs`."""
    logits = logits.astype(jnp.float32)
    size = min(count, logits.shape[1])
    values, ids = lax.top_k(logits, size)
    top = values[:, 0]
    total = jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=1))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - top - total
    fill = ((0, 0), (0, count - size))
    ids = jnp.pad(ids.astype(jnp.int32), fill, constant_values=-1)
    values = jnp.pad(values - top[:, None] - total[:, None], fill, constant_values=-jnp.inf)
    return chosen, ids, values
