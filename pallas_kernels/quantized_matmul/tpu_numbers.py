"""How the TPU kernels read stored numbers, and how float32 becomes sums of bfloat16 (step 6).

A TPU multiplies bfloat16 (and, on some chips, int8 and fp8) numbers and adds in float32. Every
stored value of a weight is a bfloat16 number exactly; float32 numbers are sums of bfloat16
numbers, their planes: three hold all of its 24 bits. Everything here works inside kernels and
outside. Must not know shapes or blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.scheme import INT4_ZERO, Scheme

#: Planes that hold every bit of a float32 number.
EXACT_PLANES = 3
_UPPER_HALF = -(2**16)
_FLOAT16_MAGNITUDE, _FLOAT16_SIGN = 0x7FFF, 0x8000
_FLOAT16_SMALLEST_NORMAL, _FLOAT16_INFINITY = 0x0400, 0x7C00


def planes_of(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` bfloat16 arrays whose sum is x (float32), from the largest to the smallest.

    All but the last are cut off, not rounded: a subtraction of what was rounded is a thing that
    XLA may take for zero.
    """
    planes = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) & _UPPER_HALF
        upper = lax.bitcast_convert_type(bits, jnp.float32)
        planes.append(upper.astype(jnp.bfloat16))
        x = x - upper
    return [*planes, x.astype(jnp.bfloat16)]


def halves(values: jax.Array, scheme: Scheme) -> list[jax.Array]:
    """A block of stored values as int32 or float32 whole numbers, one array per column in a byte.

    int4: that of even columns of the weight, then that of odd ones, each of the block's shape;
    -8 to 7 without stored zero points, else 0 to 15.
    """
    if scheme.values != "int4":
        return [values]
    bytes_ = values.astype(jnp.int32)
    zero = 0 if scheme.zeros else int(INT4_ZERO)
    return [(bytes_ & 15) - zero, (bytes_ >> 4) - zero]


def to_bfloat16(values: jax.Array) -> jax.Array:
    """Stored values as bfloat16, exactly."""
    if values.dtype == jnp.int32:
        values = values.astype(jnp.float32)
    return values.astype(jnp.bfloat16)


def float16_bits(x: jax.Array) -> jax.Array:
    """float16 as uint16, which kernels can load; other dtypes as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.float16 else x


def to_float32(stored: jax.Array) -> jax.Array:
    """Scales or zero points, as `float16_bits` left them, as float32, exactly."""
    if stored.dtype != jnp.uint16:
        return stored.astype(jnp.float32)
    bits = stored.astype(jnp.int32)
    magnitude = bits & _FLOAT16_MAGNITUDE
    # The exponent's bias is 15 in one and 127 in the other, and their fields end 13 bits apart.
    value = lax.bitcast_convert_type((magnitude << 13) + ((127 - 15) << 23), jnp.float32)
    tiny = magnitude.astype(jnp.float32) * jnp.float32(2.0**-24)
    value = jnp.where(magnitude < _FLOAT16_SMALLEST_NORMAL, tiny, value)
    value = jnp.where(magnitude >= _FLOAT16_INFINITY, jnp.float32(jnp.nan), value)
    return jnp.where((bits & _FLOAT16_SIGN) != 0, -value, value)
