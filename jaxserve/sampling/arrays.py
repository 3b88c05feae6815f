"""The sampler's arrays per row of one step, built on the host (between steps 4 and 7).

Two arrays hold everything, so that a step hands over two buffers and not fourteen. What does not
change during a sequence's life is computed once (`RowTemplate`); per step a row costs two copies
of a few numbers. No value in here is ever a compile-time constant.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.request import SamplingParams

#: Repetition penalties beyond this act the same in float32, and a larger one would overflow.
_LARGEST_REPETITION = 1e30


class Flag(enum.IntFlag):
    """What a row asks for beyond its numbers."""

    VALID = 1
    LOGPROBS = 2
    BIAS = 4
    ALLOWED = 8
    BAD_WORDS = 16
    HOLD_STOPS = 32
    CONTINUES = 64


#: Any of these means that the logits are changed before sampling.
ADJUSTING = Flag.BIAS | Flag.ALLOWED | Flag.BAD_WORDS | Flag.HOLD_STOPS

_VALID, _HOLD_STOPS, _CONTINUES = (  # plain numbers: with enums, a row costs microseconds
    int(flag) for flag in (Flag.VALID, Flag.HOLD_STOPS, Flag.CONTINUES)
)
NUM_INTS, NUM_FLOATS = 7, 6
_TOP_K, _SEED_LOW, _SEED_HIGH, _POSITION, _SLOT, _FLAGS, _GUESS = range(NUM_INTS)
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(NUM_FLOATS)


class SampleRows(NamedTuple):
    """One step's rows: ints [R, 7] int32 and floats [R, 6] float32. Numpy on the host, traced in the step.

    A row with Flag.CONTINUES samples the token after a guess: it follows the row before it, which
    is of the same slot, and means something only if that row's token is the guess.
    """

    ints: jax.Array | npt.NDArray[np.int32]
    floats: jax.Array | npt.NDArray[np.float32]

    @property
    def top_k(self) -> jax.Array:
        """[R] int32; 0: off."""
        return jnp.asarray(self.ints[:, _TOP_K])

    @property
    def seed(self) -> jax.Array:
        """[R, 2] uint32: low and high word."""
        words = jnp.asarray(self.ints[:, _SEED_LOW : _SEED_HIGH + 1])
        return lax.bitcast_convert_type(words, jnp.uint32)

    @property
    def position(self) -> jax.Array:
        """[R] int32: absolute position of the token being sampled."""
        return jnp.asarray(self.ints[:, _POSITION])

    @property
    def slot(self) -> jax.Array:
        """[R] int32."""
        return jnp.asarray(self.ints[:, _SLOT])

    @property
    def guess(self) -> jax.Array:
        """[R] int32: of rows that continue, the guessed token that they go on from."""
        return jnp.asarray(self.ints[:, _GUESS])

    def has(self, flag: Flag) -> jax.Array:
        """[R] bool: rows with any of the bits of `flag`."""
        return (jnp.asarray(self.ints[:, _FLAGS]) & int(flag)) != 0

    @property
    def temperature(self) -> jax.Array:
        """[R] float32; 0: greedy."""
        return jnp.asarray(self.floats[:, _TEMPERATURE])

    @property
    def top_p(self) -> jax.Array:
        """[R] float32; 1: off."""
        return jnp.asarray(self.floats[:, _TOP_P])

    @property
    def min_p(self) -> jax.Array:
        """[R] float32; 0: off."""
        return jnp.asarray(self.floats[:, _MIN_P])

    @property
    def repetition(self) -> jax.Array:
        """[R] float32; 1: off."""
        return jnp.asarray(self.floats[:, _REPETITION])

    @property
    def presence(self) -> jax.Array:
        """[R] float32; 0: off."""
        return jnp.asarray(self.floats[:, _PRESENCE])

    @property
    def frequency(self) -> jax.Array:
        """[R] float32; 0: off."""
        return jnp.asarray(self.floats[:, _FREQUENCY])


class RowTemplate(NamedTuple):
    """The part of a row that stays for a sequence's life: ints [7], floats [6], min_tokens."""

    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]
    min_tokens: int


class RowEntry(NamedTuple):
    """One row of a step.

    position: absolute position of the token being sampled (prompt length for the first token).
    num_generated: tokens generated before it. valid: False where the token means nothing and the
    state keeps what it had. guess: of a row that continues the one before, see SampleRows.
    """

    template: RowTemplate
    slot: int
    position: int
    num_generated: int
    valid: bool = True
    guess: int | None = None


def row_template(params: SamplingParams, seed: int, *, constrained: bool = False) -> RowTemplate:
    """The unchanging part of a sequence's rows; seed: 64 bits, signed or not.

    constrained: each step brings its own mask of allowed tokens.
    """
    flags = Flag(0)
    for wanted, flag in (
        (params.logprobs is not None, Flag.LOGPROBS),
        (bool(params.logit_bias), Flag.BIAS),
        (constrained or params.allowed_token_ids is not None, Flag.ALLOWED),
        (bool(params.bad_words), Flag.BAD_WORDS),
    ):
        flags |= flag if wanted else Flag(0)
    ints = np.zeros(NUM_INTS, np.int32)
    ints[_TOP_K] = min(params.top_k, 2**31 - 1)
    ints[_SEED_LOW : _SEED_HIGH + 1] = np.frombuffer((seed % 2**64).to_bytes(8, "little"), "<i4")
    ints[_FLAGS] = int(flags)
    floats = np.zeros(NUM_FLOATS, np.float32)
    floats[_TEMPERATURE] = params.temperature
    floats[_TOP_P] = params.top_p
    floats[_MIN_P] = params.min_p
    floats[_REPETITION] = min(
        max(params.repetition_penalty, 1 / _LARGEST_REPETITION), _LARGEST_REPETITION
    )
    floats[_PRESENCE] = params.presence_penalty
    floats[_FREQUENCY] = params.frequency_penalty
    return RowTemplate(ints, floats, params.min_tokens)


def row_arrays(entries: Sequence[RowEntry], num_rows: int, trash_slot: int) -> SampleRows:
    """Arrays for `num_rows` rows (the bucket): the entries in order, then padding rows.

    Padding rows are greedy, ask for nothing, and belong to the trash slot (max_num_seqs).
    """
    assert len(entries) <= num_rows, f"{len(entries)} rows in a bucket of {num_rows}"
    ints = np.zeros((num_rows, NUM_INTS), np.int32)
    floats = np.zeros((num_rows, NUM_FLOATS), np.float32)
    ints[len(entries) :, _SLOT] = trash_slot
    floats[len(entries) :, _TOP_P] = 1.0
    floats[len(entries) :, _REPETITION] = 1.0
    if entries:
        used = slice(len(entries))
        ints[used] = np.stack([entry.template.ints for entry in entries])
        floats[used] = np.stack([entry.template.floats for entry in entries])
        ints[used, _POSITION] = [entry.position for entry in entries]
        ints[used, _SLOT] = [entry.slot for entry in entries]
        ints[used, _FLAGS] |= np.array([_flags(entry) for entry in entries], np.int32)
        ints[used, _GUESS] = [entry.guess or 0 for entry in entries]
    return SampleRows(ints, floats)


def _flags(entry: RowEntry) -> int:
    """Those that depend on the step."""
    flags = _VALID if entry.valid else 0
    if entry.num_generated < entry.template.min_tokens:
        flags |= _HOLD_STOPS
    if entry.guess is not None:
        flags |= _CONTINUES
    return flags
