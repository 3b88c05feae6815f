"""One sampling step inside the compiled step (step 7): logits in, tokens and new state out.

Pure and traceable: the engine calls it inside its own program and donates the state. It must not
know how the logits came about nor which request a row belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling.adjust import adjust_logits
from jaxserve.sampling.arrays import Flag, SampleRows
from jaxserve.sampling.state import SamplingState
from pallas_kernels.dispatch import Choice
from pallas_kernels.sample import api


class SampleResult(NamedTuple):
    """What a step chose, per row.

    tokens: [R] int32. ok: [R] bool, False where the logits hold a NaN or +inf or where no token
    is left to choose; the token is a valid id without meaning then.
    logprob: [R] float32, top_ids: [R, 20] int32 and top_logprobs: [R, 20] float32, descending, of
    the model's unmodified logits; zeros in a step where no row asks for them.
    """

    tokens: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    ok: jax.Array


def sample_step(
    logits: jax.Array,
    state: SamplingState,
    rows: SampleRows,
    *,
    implementation: Choice | str = api.DEFAULT,
) -> tuple[SampleResult, SamplingState]:
    """Samples one token for each row of logits [R, V] and records those of valid rows in the state.

    implementation: of the op `sample`, chosen once by `pallas_kernels.dispatch`.
    """
    logits = logits.astype(jnp.float32)
    tokens, ok = api.sample(
        adjust_logits(logits, state, rows),
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        implementation=implementation,
    )
    logprob, top_ids, top_logprobs = _logprobs(logits, tokens, rows, implementation)
    ok &= api.is_sound(logits, implementation=implementation)
    result = SampleResult(tokens, logprob, top_ids, top_logprobs, ok)
    return result, record(state, rows, tokens)


def final_logits(logits: jax.Array, state: SamplingState, rows: SampleRows) -> jax.Array:
    """[R, V] float32, -inf for what cannot be chosen: `sample_step` draws from their softmax."""
    return api.filtered_logits(
        adjust_logits(logits.astype(jnp.float32), state, rows),
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
    )


def record(state: SamplingState, rows: SampleRows, tokens: jax.Array) -> SamplingState:
    """State after `tokens` [R] int32; rows that are not accepted write to the trash slot.

    Of several accepted rows of a slot the last one is what is left in `last_token` and `tail`;
    a sequence that reads its tail has one row only (`limits.reads_output`).
    """
    trash = state.last_token.shape[0] - 1
    valid = accepted(rows, tokens)
    goes_on = jnp.append((rows.has(Flag.CONTINUES) & valid)[1:], False)
    slot = jnp.where(valid, rows.slot, trash)
    last = jnp.where(goes_on, trash, slot)
    tail = jnp.concatenate([state.tail[last][:, 1:], tokens[:, None]], axis=1)
    return state._replace(
        last_token=state.last_token.at[last].set(tokens),
        output_counts=state.output_counts.at[slot, tokens].add(1),
        tail=state.tail.at[last].set(tail),
    )


def accepted(rows: SampleRows, tokens: jax.Array) -> jax.Array:
    """[R] bool: valid rows whose sequence got as far, since all guesses before them came true."""
    continues = rows.has(Flag.CONTINUES)
    missed = continues & (jnp.roll(tokens, 1) != rows.guess)
    misses = jnp.cumsum(missed)
    index = jnp.arange(tokens.shape[0])
    first = lax.cummax(jnp.where(continues, 0, index))  # of the rows that belong together
    return rows.has(Flag.VALID) & (misses == misses[first])


def _logprobs(
    logits: jax.Array, tokens: jax.Array, rows: SampleRows, implementation: Choice | str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    count = logits.shape[0]
    nothing = (
        jnp.zeros(count, jnp.float32),
        jnp.zeros((count, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((count, MAX_LOGPROBS), jnp.float32),
    )
    values: tuple[jax.Array, jax.Array, jax.Array] = lax.cond(
        jnp.any(rows.has(Flag.LOGPROBS)),
        lambda: api.top_logprobs(logits, tokens, MAX_LOGPROBS, implementation=implementation),
        lambda: nothing,
    )
    return values
