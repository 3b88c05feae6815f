"""Rotary position embedding (Su et al. 2021) with the ways of stretching it to longer contexts.

Frequencies are computed on the host in float64. Inside the program an angle is the product of a
position and a frequency kept as a 48-bit fixed-point fraction of a turn: whole turns fall off by
integer overflow, so that sin and cos see [-pi, pi] and are as exact at position 131,072 as at 1.
(float32 positions times float32 frequencies are wrong by up to 0.008 rad there.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.config import RopeConfig

Rotation = tuple[jax.Array, jax.Array]

#: Ways of scaling that `inverse_frequencies` knows; families refuse all others by name.
SCALING_TYPES = ("default", "linear", "llama3", "yarn", "factors")


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Radians per position, float64 [rotary_dim / 2], and the factor on sin and cos.

    "linear": all frequencies divided by `factor`. "llama3": Llama 3.1's smooth step between low
    and high frequencies. "yarn": Peng et al. 2023. "factors": each divided by its own of `factors`
    (what llama.cpp stores as rope_freqs.weight).
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = np.asarray(rope.theta, np.float64) ** -exponents
    match rope.scaling_type:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / _number(rope, "factor"), 1.0
        case "llama3":
            return _llama3(rope, frequencies), 1.0
        case "yarn":
            return _yarn(rope, frequencies)
        case "factors":
            return frequencies / np.asarray(rope.scaling["factors"], np.float64), 1.0
        case other:
            raise AssertionError(f"rope scaling {other!r} got past the family's reader")


def _number(rope: RopeConfig, key: str, default: float | None = None) -> float:
    value = rope.scaling.get(key, default)
    assert isinstance(value, int | float), (key, value)
    return float(value)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    turns = _number(rope, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: np.ndarray = keep * frequencies + (1 - keep) * frequencies / factor
    return scaled


def _yarn(rope: RopeConfig, frequencies: np.ndarray) -> tuple[np.ndarray, float]:
    factor = _number(rope, "factor")
    original = _number(rope, "original_max_position_embeddings")

    def dimension_of(rotations: float) -> float:
        """The (fractional) index of the frequency that makes so many turns in the old context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    low = dimension_of(_number(rope, "beta_fast", 32.0))
    high = dimension_of(_number(rope, "beta_slow", 1.0))
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    scaled = frequencies * (1 - stretch) + frequencies / factor * stretch
    return scaled, _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: RopeConfig, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.scaling.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.scaling.get("mscale") and rope.scaling.get("mscale_all_dim"):
        return magnitude(_number(rope, "mscale")) / magnitude(_number(rope, "mscale_all_dim"))
    return magnitude(1.0)


def make_rotation(rope: RopeConfig, positions: jax.Array) -> Rotation:
    """cos and sin, float32 [T, rotary_dim / 2], of integer positions [T] (0 to 2**31 - 1)."""
    frequencies, magnitude = inverse_frequencies(rope)
    fixed = np.rint(frequencies / (2 * math.pi) * 2.0**48).astype(np.uint64)
    high = jnp.asarray((fixed >> np.uint64(16)).astype(np.uint32))
    low = jnp.asarray((fixed & np.uint64(0xFFFF)).astype(np.uint32))

    def tables(positions: jax.Array) -> Rotation:
        position = positions.astype(jnp.uint32)[:, None]
        # position * fixed / 2**16 modulo one turn of 2**32, in 32-bit pieces that cannot overflow.
        carry = (position >> 16) * low + (((position & 0xFFFF) * low) >> 16)
        phase = (position * high + carry).astype(jnp.int32)
        angle = phase.astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
        return jnp.cos(angle) * np.float32(magnitude), jnp.sin(angle) * np.float32(magnitude)

    def nothing(positions: jax.Array) -> Rotation:
        zeros = jnp.zeros((positions.shape[0], len(fixed)), jnp.float32)
        return zeros, zeros

    # A branch is what XLA does not fuse across: it would else compute sin and cos again in every
    # layer for every head (an optimization_barrier is gone before it fuses). First positions are
    # not negative.
    rotation: Rotation = lax.cond(positions[0] < 0, nothing, tables, positions)
    return rotation


def make_rotations(
    ropes: Sequence[RopeConfig | None], positions: jax.Array
) -> tuple[Rotation | None, ...]:
    """One entry per layer; layers with equal ropes share one pair of tables, None stays None."""
    distinct: list[tuple[RopeConfig, Rotation]] = []
    out: list[Rotation | None] = []
    for rope in ropes:
        if rope is None:
            out.append(None)
            continue
        found = [rotation for known, rotation in distinct if known == rope]
        if not found:
            found = [make_rotation(rope, positions)]
            distinct.append((rope, found[0]))
        out.append(found[0])
    return tuple(out)


def apply_rope(x: jax.Array, rotation: Rotation, *, interleaved: bool) -> jax.Array:
    """x [T, heads, H] with its leading rotary_dim dimensions turned; arithmetic is float32.

    interleaved: pairs are neighbours (0, 1), (2, 3); otherwise halves (i, i + rotary_dim / 2).
    """
    cos, sin = (table[:, None, :] for table in rotation)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        out = jnp.stack(parts, axis=-1).reshape(turned.shape)
    else:
        out = jnp.concatenate(parts, axis=-1)
    return (
        jnp.concatenate((out.astype(x.dtype), rest), axis=-1)
        if rest.shape[-1]
        else out.astype(x.dtype)
    )
