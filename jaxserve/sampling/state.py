"""What the sampler keeps on the device per slot of the running batch (step 7).

The state is donated to every step and to every reset. A slot's rows are read only by rows of the
batch that ask for them (flags and values in `arrays.py`), so a slot needs a reset only when its new
sequence uses one of these features (`needs_reset`); otherwise what an earlier sequence left there
is never read. `last_token` is the exception: it is written by the step that samples and read by
the next step of the same sequence, so it never needs a reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.request import MAX_BAD_WORD_TOKENS, SamplingParams
from jaxserve.sampling.limits import SamplingLimits, check_limits

Int32s = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]


class SamplingState(NamedTuple):
    """Per-slot arrays; S = max_num_seqs + 1: the last slot is the trash slot of rows to ignore.

    W = ceil(V / 32): bit v % 32 of word v // 32 stands for token v.
    last_token: [S] int32, the token sampled last.
    output_counts: [S, V] int32, how often each token was generated.
    prompt_bits: [S, W] uint32, the prompt's tokens.
    tail: [S, 8] int32, the last tokens of prompt and output, oldest first, -1 where there is none.
    bias_ids: [S, NB] int32, V where unused; bias_values: [S, NB] float32.
    allowed_bits: [S, W] uint32, the tokens that may be chosen.
    stop_bits: [S, W] uint32, the tokens that may not be chosen before min_tokens are generated.
    bad_words: [S, NW, 8] int32, right-aligned, -1 where unused.
    """

    last_token: jax.Array
    output_counts: jax.Array
    prompt_bits: jax.Array
    tail: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    allowed_bits: jax.Array
    stop_bits: jax.Array
    bad_words: jax.Array


class SlotReset(NamedTuple):
    """What a new sequence brings to its slot: host arrays, shapes as in SamplingState without S."""

    slot: npt.NDArray[np.int32]
    output_counts: Int32s
    prompt_bits: Words
    tail: Int32s
    bias_ids: Int32s
    bias_values: npt.NDArray[np.float32]
    allowed_bits: Words
    stop_bits: Words
    bad_words: Int32s


def make_state(
    max_num_seqs: int, vocab_size: int, limits: SamplingLimits | None = None
) -> SamplingState:
    """The state of an engine that has not run anything yet."""
    limits = limits or SamplingLimits()
    slots, words = max_num_seqs + 1, -(-vocab_size // 32)
    return SamplingState(
        last_token=jnp.zeros(slots, jnp.int32),
        output_counts=jnp.zeros((slots, vocab_size), jnp.int32),
        prompt_bits=jnp.zeros((slots, words), jnp.uint32),
        tail=jnp.full((slots, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
        bias_ids=jnp.full((slots, limits.bias_tokens), vocab_size, jnp.int32),
        bias_values=jnp.zeros((slots, limits.bias_tokens), jnp.float32),
        allowed_bits=jnp.zeros((slots, words), jnp.uint32),
        stop_bits=jnp.zeros((slots, words), jnp.uint32),
        bad_words=jnp.full((slots, limits.bad_words, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
    )


#: Masks that one call of `allow_tokens` places.
MASKS_AT_ONCE = 8


def allow_tokens(state: SamplingState, slots: jax.Array, masks: jax.Array) -> SamplingState:
    """State in which the slots [MASKS_AT_ONCE] int32 allow the masks [MASKS_AT_ONCE, W] uint32.

    Rows read them if they have `Flag.ALLOWED`. Compile once with the state donated.
    """
    return state._replace(allowed_bits=state.allowed_bits.at[slots].set(masks))


def needs_reset(params: SamplingParams) -> bool:
    """Whether a sequence reads any per-slot array, so that its slot must be reset for it."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or params.min_tokens
    )


def pack_bits(token_ids: Sequence[int], vocab_size: int) -> Words:
    """[ceil(V / 32)] uint32 with the bits of token_ids set."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    chosen[np.asarray(token_ids, np.int64)] = True
    return np.packbits(chosen, bitorder="little").view("<u4").astype(np.uint32)


def unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """[R, W] uint32 -> [R, V] bool."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def slot_reset(
    slot: int,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Sequence[int],
    vocab_size: int,
    limits: SamplingLimits | None = None,
) -> SlotReset:
    """Host arrays for a sequence that takes `slot`; output_ids is not empty after a preemption.

    stop_ids: every token that would end this answer (end-of-sequence ids unless ignored, and
    stop_token_ids). Raises RequestError where params exceed limits.
    """
    limits = limits or SamplingLimits()
    check_limits(params, limits)
    width = MAX_BAD_WORD_TOKENS
    recent = [*prompt_ids[-width:], *output_ids[-width:]][-width:]
    tail = np.full(width, -1, np.int32)
    if recent:
        tail[-len(recent) :] = recent
    bias_ids = np.full(limits.bias_tokens, vocab_size, np.int32)
    bias_values = np.zeros(limits.bias_tokens, np.float32)
    bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    bad_words = np.full((limits.bad_words, width), -1, np.int32)
    for row, word in enumerate(params.bad_words):
        bad_words[row, -len(word) :] = word
    counts = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size)
    return SlotReset(
        slot=np.asarray(slot, np.int32),
        output_counts=counts.astype(np.int32),
        prompt_bits=pack_bits(prompt_ids, vocab_size),
        tail=tail,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed_bits=pack_bits(params.allowed_token_ids or (), vocab_size),
        stop_bits=pack_bits(stop_ids, vocab_size),
        bad_words=bad_words,
    )


def reset_slot(state: SamplingState, reset: SlotReset) -> SamplingState:
    """State with one slot replaced. Compile once with the state donated; no value recompiles."""

    def place(rows: jax.Array, row: npt.NDArray[np.generic] | jax.Array) -> jax.Array:
        placed: jax.Array = lax.dynamic_update_index_in_dim(rows, jnp.asarray(row), reset.slot, 0)
        return placed

    names = [name for name in SlotReset._fields if name != "slot"]
    return state._replace(
        **{name: place(getattr(state, name), getattr(reset, name)) for name in names}
    )
