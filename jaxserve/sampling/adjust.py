"""Changes to the logits before sampling, each row by what its request asks for (step 7).

In this order: logit_bias, repetition, frequency and presence penalty; then what is forbidden
becomes -inf: tokens outside allowed_token_ids, stop tokens before min_tokens, the last token of a
bad word whose other tokens have just been written. Temperature and filters come after
(`pallas_kernels.sample`). A part that no row of the batch asks for is not computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.arrays import ADJUSTING, Flag, SampleRows
from jaxserve.sampling.state import SamplingState, unpack_bits


def adjust_logits(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    """Logits [R, V] float32 as the sampler must see them; rows that ask for nothing are unchanged."""
    penalised = (rows.repetition != 1.0) | (rows.presence != 0.0) | (rows.frequency != 0.0)
    masked = rows.has(Flag.ALLOWED | Flag.HOLD_STOPS)

    def adjust(logits: jax.Array) -> jax.Array:
        for wanted, change in (
            (rows.has(Flag.BIAS), _add_bias),
            (penalised, _penalise),
            (masked, _mask_tokens),
            (rows.has(Flag.BAD_WORDS), _mask_bad_words),
        ):
            logits = lax.cond(
                jnp.any(wanted),
                lambda logits, change=change: change(logits, state, rows),
                lambda logits: logits,
                logits,
            )
        return logits

    wanted = jnp.any(penalised | rows.has(ADJUSTING))
    adjusted: jax.Array = lax.cond(wanted, adjust, lambda logits: logits, logits)
    return adjusted


def _add_bias(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    count, vocab = logits.shape
    ids = jnp.where(rows.has(Flag.BIAS)[:, None], state.bias_ids[rows.slot], vocab)
    values = state.bias_values[rows.slot]
    return logits.at[jnp.arange(count)[:, None], ids].add(values, mode="drop")


def _penalise(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    counts = state.output_counts[rows.slot]
    written = counts > 0
    seen = written | unpack_bits(state.prompt_bits[rows.slot], logits.shape[1])
    factor = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - rows.frequency[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(written, rows.presence[:, None], 0.0)


def _mask_tokens(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    vocab = logits.shape[1]
    allowed = unpack_bits(state.allowed_bits[rows.slot], vocab)
    allowed |= ~rows.has(Flag.ALLOWED)[:, None]
    stops = unpack_bits(state.stop_bits[rows.slot], vocab)
    stops &= rows.has(Flag.HOLD_STOPS)[:, None]
    return jnp.where(allowed & ~stops, logits, -jnp.inf)


def _mask_bad_words(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    count, vocab = logits.shape
    words = state.bad_words[rows.slot]  # [R, NW, 8]
    start, last = words[:, :, :-1], words[:, :, -1]
    tail = state.tail[rows.slot][:, None, 1:]
    written = jnp.all((start == tail) | (start < 0), axis=2)
    banned = written & (last >= 0) & rows.has(Flag.BAD_WORDS)[:, None]
    ids = jnp.where(banned, last, vocab)
    return logits.at[jnp.arange(count)[:, None], ids].set(-jnp.inf, mode="drop")
