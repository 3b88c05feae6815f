"""Definition of the product of rows with a float32 matrix, which is also XLA's own way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def refusals(*, platform: str, dtype: DTypeLike, out_size: int, in_size: int) -> list[str]:
    """What has no meaning; the platform and the sizes make no difference."""
    name = jnp.dtype(dtype).name
    return [] if jnp.issubdtype(dtype, jnp.floating) else [f"{name} is not a floating-point type"]


def float_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, K] times weight [N, K] transposed: float32 [M, N]. float32 in full precision."""
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
