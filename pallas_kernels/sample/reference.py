"""Definition of filtering and sampling in plain jnp, with sorts.

    scaled  = (logits - max) / temperature
    min_p   keep p >= min_p * max p, with p = softmax(scaled)
    top_k   keep the k largest; what equals the k-th stays as well
    top_p   softmax over what is left, summed in ascending order: drop while the sum <= 1 - top_p;
            the largest stays. Among equals the lowest ids are dropped first, as a stable sort
            does; among the equally largest the highest, so that a small top_p is greedy.
    token   argmax(scaled + Gumbel noise) over what is left

temperature below `GREEDY_TEMPERATURE`, top_k 1 and min_p 1 mean the largest logit (the lowest id
among equals) and nothing else. top_k 0, top_p 1 and min_p 0 switch those filters off.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sample import noise

GREEDY_TEMPERATURE = 1e-5


def refusals(*, platform: str, vocab_size: int) -> list[str]:
    """What has no meaning; the platform makes no difference."""
    return [] if vocab_size > 0 else [f"a vocabulary of {vocab_size} tokens has nothing to choose"]


def is_greedy(temperature: jax.Array, top_k: jax.Array, min_p: jax.Array) -> jax.Array:
    """[R] bool: rows that take the largest logit whatever the noise."""
    return (temperature < GREEDY_TEMPERATURE) | (top_k == 1) | (min_p >= 1.0)


def is_sound(logits: jax.Array) -> jax.Array:
    """[R] bool: rows of logits [R, V] without NaN or +inf and with something besides -inf."""
    broken = jnp.any(jnp.isnan(logits) | jnp.isposinf(logits), axis=1)
    return ~broken & jnp.any(jnp.isfinite(logits), axis=1)


def filtered_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """Scaled logits, -inf outside the support; softmax of a row is the final distribution.

    logits: [R, V] float32, at least one finite value a row (else the row is undefined);
    temperature, top_p, min_p: [R] float32; top_k: [R] int32. Returns [R, V] float32, 0 at the top.
    """
    vocab = logits.shape[1]
    greedy = is_greedy(temperature, top_k, min_p)
    scale = jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = (logits - logits.max(1, keepdims=True)) / scale
    scaled = jnp.where(jnp.exp(scaled) >= min_p[:, None], scaled, -jnp.inf)

    descending = -jnp.sort(-scaled, axis=1)
    rank = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k) - 1
    kth = jnp.take_along_axis(descending, rank[:, None], axis=1)
    scaled = jnp.where(scaled >= kth, scaled, -jnp.inf)

    ids = jnp.broadcast_to(jnp.arange(vocab), scaled.shape)
    order = jnp.lexsort((jnp.where(scaled == 0, -ids, ids), scaled), axis=1)
    probability = jnp.take_along_axis(jax.nn.softmax(scaled, axis=1), order, axis=1)
    drop = jnp.cumsum(probability, axis=1) <= 1.0 - top_p[:, None]
    drop = drop.at[:, -1].set(False) & (top_p < 1.0)[:, None]
    inverse = jnp.argsort(order, axis=1)
    scaled = jnp.where(jnp.take_along_axis(drop, inverse, axis=1), -jnp.inf, scaled)

    first = jnp.argmax(logits, axis=1)[:, None] == ids
    return jnp.where(greedy[:, None], jnp.where(first, 0.0, -jnp.inf), scaled)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token per row, [R] int32, and whether the row's logits were usable, [R] bool.

    seed: [R, 2] uint32 (low and high word), position: [R] int32; the rest as in `filtered_logits`.
    A row with a NaN or +inf, or with nothing but -inf, is not ok; its token is a valid id that
    means nothing, and other rows are not touched by it.
    """
    ok = is_sound(logits)
    logits = jnp.where(ok[:, None], logits, 0.0)
    kept = filtered_logits(logits, temperature, top_k, top_p, min_p)
    chosen = jnp.argmax(kept + noise.gumbel(seed, position, logits.shape[1]), axis=1)
    return chosen.astype(jnp.int32), ok


def top_logprobs(
    logits: jax.Array, tokens: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Natural-log probabilities under softmax(logits): of `tokens` [R], and the `count` largest.

    Returns ([R] float32, ids [R, count] int32, values [R, count] float32), descending, the lowest
    id first among equals. A vocabulary smaller than `count` is filled up with id -1 and -inf.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    ids = jnp.argsort(-logprobs, axis=1, stable=True)[:, :count].astype(jnp.int32)
    values = jnp.take_along_axis(logprobs, ids, axis=1)
    fill = ((0, 0), (0, count - ids.shape[1]))
    ids = jnp.pad(ids, fill, constant_values=-1)
    return chosen, ids, jnp.pad(values, fill, constant_values=-jnp.inf)
