"""Rounding of weights and activations, in plain jnp, float32 (step 6).

Defines every number that a quantised product starts from. Rounding is to the nearest, ties to
even. Where a constant divides, its reciprocal multiplies: XLA makes that of it anyway, but not
where an array has a single element, which would then differ in its last bit. Must not know any
implementation.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.scheme import INT4_ZERO, LARGEST, QuantizedWeight, Scheme

#: A row or group whose largest magnitude is below this counts as zeros: 127 / x stays finite.
SMALLEST = 1e-30
NIBBLE_LARGEST = 15.0
#: Largest magnitude of the numbers in symmetric blocks of 5 bits, twice that in blocks of 4.
BLOCK_LARGEST = 16.0


def quantize(weight: ArrayLike, scheme: Scheme) -> QuantizedWeight:
    """A float weight [N, K] in a scheme's natural layout.

    int8 and fp8: scale = max |w| * (1 / 127) (1 / 448) over the group; for int8 max |w| * (1 / 16)
    where the rounded group is nearer to the given one: so it holds what stood in symmetric blocks
    of 4 or 5 bits (Q4_0, Q5_0) exactly. int4: the number of largest magnitude becomes -8; with zero points the range from the smallest to the largest, stretched
    to hold 0, becomes 0 to 15. Scales and zero points are rounded to the scheme's scale_dtype
    first, and values chosen for the rounded ones. A group of zeros has scale 0.
    Raises KernelError for NaN and infinity, for scales that their dtype cannot hold, and where
    groups do not fill a row.
    """
    weight = jnp.asarray(weight)
    if weight.ndim != 2:
        raise KernelError(f"{scheme.name}: a weight to quantise is [N, K], not {weight.shape}")
    scheme.num_groups(weight.shape[1])
    out: QuantizedWeight
    stored = dataclasses.replace(scheme, name="", activations="float")
    out, is_finite = _quantize(weight, stored)
    if not is_finite:
        raise KernelError(
            f"{scheme.name}: the weight holds NaN or infinity, or numbers too large for scales of "
            f"{scheme.scale_dtype}; keep it unquantised"
        )
    return out


def abstract_weight(out_size: int, in_size: int, scheme: Scheme) -> QuantizedWeight:
    """Shapes and dtypes of a weight [N, K] in a scheme, without arrays."""

    def shape(sizes: tuple[int, ...], dtype: object) -> jax.Array:
        made: jax.Array = jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))  # type: ignore
        return made

    scales = shape((out_size, scheme.num_groups(in_size)), scheme.scale_dtype)
    values = shape(scheme.values_shape(out_size, in_size), scheme.values_dtype)
    return QuantizedWeight(values, scales, scales if scheme.zeros else None)


def dequantize(weight: QuantizedWeight, scheme: Scheme) -> jax.Array:
    """The float32 weight [..., K] that a quantised one (natural layout, any rows) stands for."""
    values = whole_values(weight.values, scheme)
    groups = weight.scales.shape[-1]
    values = values.reshape(*values.shape[:-1], groups, -1)
    if weight.zeros is not None:
        values = values - weight.zeros.astype(jnp.float32)[..., None]
    out = values * weight.scales.astype(jnp.float32)[..., None]
    return out.reshape(*out.shape[:-2], -1)


def whole_values(values: jax.Array, scheme: Scheme) -> jax.Array:
    """Stored values as float32 [..., K]; without stored zero points int4 is -8 to 7."""
    if scheme.values == "int4":
        pairs = jnp.stack([values & 15, values >> 4], axis=-1)
        values = pairs.reshape(*pairs.shape[:-2], -1)
        if not scheme.zeros:
            return values.astype(jnp.float32) - INT4_ZERO
    return values.astype(jnp.float32)


def round_integers(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Values of "int8" or "int16" and float32 scales of x [..., g], one scale per last axis [...].

        largest = max |x|;  values = round(x * (top / largest));  scale = largest * (1 / top)

    with top 127 or 32767. Below SMALLEST both are 0. Where x holds NaN or infinity the scale is
    NaN.
    """
    values, scale = _scaled(x, LARGEST[dtype])
    return jnp.round(values).astype(dtype), scale


def round_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn values and float32 scales of x [..., g]; as `round_integers` with top 448."""
    top = LARGEST["float8_e4m3fn"]
    values, scale = _scaled(x, top)
    return jnp.clip(values, -top, top).astype(jnp.float8_e4m3fn), scale


def _scaled(x: jax.Array, top: float) -> tuple[jax.Array, jax.Array]:
    """x stretched to reach from -top to top, and what undoes that."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    sound = jnp.isfinite(largest)
    used = sound & (largest >= SMALLEST)
    inverse = jnp.where(used, top / jnp.where(used, largest, 1.0), 0.0)
    values = jnp.where(sound[..., None], x, 0.0) * inverse[..., None]
    return values, jnp.where(used, largest * _reciprocal(top), jnp.where(sound, 0.0, jnp.nan))


def _reciprocal(number: float) -> np.float32:
    """1 / number, rounded to float32."""
    return np.float32(1) / np.float32(number)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(weight: jax.Array, scheme: Scheme) -> tuple[QuantizedWeight, jax.Array]:
    rows, columns = weight.shape
    groups = weight.astype(jnp.float32).reshape(rows, scheme.num_groups(columns), -1)
    dtype = jnp.dtype(scheme.scale_dtype)
    zeros = None
    if scheme.values == "int8":
        scales, values = _nearest_int8(groups, dtype)
    elif scheme.values != "int4":
        top = LARGEST[scheme.values]
        scales = (jnp.max(jnp.abs(groups), -1) * _reciprocal(top)).astype(dtype)
        values = jnp.clip(groups * _inverse(scales), -top, top)
    elif scheme.zeros:
        low = jnp.minimum(groups.min(-1), 0.0)
        high = jnp.maximum(groups.max(-1), 0.0)
        scales = ((high - low) * _reciprocal(NIBBLE_LARGEST)).astype(dtype)
        inverse = _inverse(scales)
        zeros = (-low * inverse[..., 0]).astype(dtype)
        values = groups * inverse + zeros.astype(jnp.float32)[..., None]
        values = jnp.clip(jnp.round(values), 0.0, NIBBLE_LARGEST)
    else:
        at = jnp.argmax(jnp.abs(groups), -1, keepdims=True)
        scales = (jnp.take_along_axis(groups, at, -1)[..., 0] / -INT4_ZERO).astype(dtype)
        values = jnp.clip(jnp.round(groups * _inverse(scales)) + INT4_ZERO, 0.0, NIBBLE_LARGEST)
    values = values.reshape(rows, columns)
    if scheme.values == "int4":
        nibbles = values.astype(jnp.uint8).reshape(rows, -1, 2)
        values = nibbles[..., 0] | (nibbles[..., 1] << 4)
    is_finite = jnp.isfinite(groups).all() & jnp.isfinite(scales).all()
    return QuantizedWeight(values.astype(scheme.values_dtype), scales, zeros), is_finite


def _nearest_int8(groups: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Scales [..., G] and whole values [..., G, g] of float32 groups [..., G, g]; see `quantize`."""
    largest = jnp.max(jnp.abs(groups), -1)
    found = []
    for top in (LARGEST["int8"], BLOCK_LARGEST):
        scales = (largest * _reciprocal(top)).astype(dtype)
        values = jnp.round(jnp.clip(groups * _inverse(scales), -LARGEST["int8"], LARGEST["int8"]))
        error = jnp.square(values * scales.astype(jnp.float32)[..., None] - groups).sum(-1)
        found.append((scales, values, error))
    (scales, values, error), (coarse_scales, coarse_values, coarse_error) = found
    better = coarse_error < error
    return (
        jnp.where(better, coarse_scales, scales),
        jnp.where(better[..., None], coarse_values, values),
    )


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scale, [..., 1] float32, and 0 where the scale is (nearly) 0."""
    scales = scales.astype(jnp.float32)[..., None]
    used = jnp.abs(scales) >= SMALLEST
    return jnp.where(used, 1.0 / jnp.where(used, scales, 1.0), 0.0)
