"""Exact filtering and sampling without sorting the vocabulary, for every platform (step 7).

Definition: `reference.py`. How the sets are found: `bounds.py`. Filters that no row uses are
skipped, and a batch of greedy rows draws no random numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sample import noise, reference
from pallas_kernels.sample.blocks import (
    BLOCK,
    flag_broken,
    largest,
    pad_to_blocks,
    top_blocks,
    top_k,
)
from pallas_kernels.sample.bounds import (
    INFINITY_BITS,
    Bounds,
    Wanted,
    find_bounds,
    nth_id,
    to_bits,
)
from pallas_kernels.sample.reference import is_greedy


def refusals(*, platform: str, vocab_size: int) -> list[str]:
    """Why this implementation cannot do such a call; every platform can."""
    return reference.refusals(platform=platform, vocab_size=vocab_size)


def is_sound(logits: jax.Array) -> jax.Array:
    """[R] bool: rows of logits [R, V] without NaN or +inf and with something besides -inf."""
    return jnp.isfinite(flag_broken(logits).max(1))


def filtered_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """Scaled logits [R, V] float32, -inf outside the support; as `reference.filtered_logits`."""
    vocab = logits.shape[1]
    top = logits.max(1)
    greedy = is_greedy(temperature, top_k, min_p)
    difference = (top[:, None] - logits) / jnp.where(greedy, 1.0, temperature)[:, None]
    distance = to_bits(difference)
    bound = to_bits(jnp.abs(jnp.log(jnp.clip(min_p, 0.0, 1.0))))
    wanted = Wanted(
        top_k=jnp.where(greedy | (top_k >= vocab), 0, top_k),
        top_p=jnp.where(greedy, 1.0, top_p),
    )
    found: Bounds = lax.cond(
        jnp.any((wanted.top_k > 0) | (wanted.top_p < 1.0)),
        lambda: find_bounds(pad_to_blocks(distance, INFINITY_BITS), bound, wanted),
        lambda: Bounds(bound, jnp.zeros_like(bound)),
    )
    bound = jnp.where(greedy, 0, found.bound)
    first, last = _tied_range(logits, distance == bound[:, None], found, greedy)
    ids = jnp.arange(vocab, dtype=jnp.int32)
    at_bound = distance == bound[:, None]
    at_bound &= (ids >= first[:, None]) & (ids <= last[:, None])
    return jnp.where((distance < bound[:, None]) | at_bound, -difference, -jnp.inf)


def _tied_range(
    logits: jax.Array, tied: jax.Array, found: Bounds, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First and last id ([R] int32 each) that stay among the tokens at the bound, tied [R, V]."""
    vocab = logits.shape[1]
    everything = jnp.zeros_like(found.drop), jnp.full_like(found.drop, vocab)

    def split() -> tuple[jax.Array, jax.Array]:
        at_top = found.bound == 0
        count = jnp.sum(tied, axis=1, dtype=jnp.int32)
        edge = nth_id(tied, jnp.where(at_top, count - found.drop, found.drop + 1))
        partial = found.drop > 0
        return (
            jnp.where(partial & ~at_top, edge, 0),
            jnp.where(partial & at_top, edge, vocab),
        )

    first, last = lax.cond(jnp.any(found.drop > 0), split, lambda: everything)
    only = lax.cond(jnp.any(greedy), lambda: largest(logits)[1], lambda: jnp.zeros_like(first))
    return jnp.where(greedy, only, first), jnp.where(greedy, only, last)


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
    top, best = largest(logits)
    ok = jnp.isfinite(top)
    temperature = jnp.where(ok, temperature, 0.0)  # a broken row must not make the others slow

    def draw() -> jax.Array:
        kept = filtered_logits(logits, temperature, top_k, top_p, min_p)
        noisy = kept + noise.gumbel(seed, position, logits.shape[1])
        return largest(noisy)[1]

    tokens: jax.Array = lax.cond(jnp.all(is_greedy(temperature, top_k, min_p)), lambda: best, draw)
    return tokens, ok


def top_logprobs(
    logits: jax.Array, tokens: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of `tokens` and of the `count` likeliest; as `reference.top_logprobs`."""
    logits = logits.astype(jnp.float32)
    size = min(count, logits.shape[1])
    top = logits.max(1, keepdims=True)
    shifted = logits - top
    mass = pad_to_blocks(jnp.exp(shifted), 0.0)
    total = jnp.log(mass.reshape(mass.shape[0], BLOCK, -1).sum(1).sum(1))[:, None]
    if -(-logits.shape[1] // BLOCK) > 2 * size:
        near = top_blocks(pad_to_blocks(logits, -jnp.inf), size)
        values, places = top_k(near.values, size)
        ids = near.token_ids(places)
    else:
        values, ids = top_k(logits, size)
    chosen = jnp.take_along_axis(shifted, tokens[:, None], axis=1) - total
    fill = ((0, 0), (0, count - size))
    ids = jnp.pad(ids, fill, constant_values=-1)
    return chosen[:, 0], ids, jnp.pad(values - top - total, fill, constant_values=-jnp.inf)
