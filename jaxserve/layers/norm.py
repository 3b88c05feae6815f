"""Root-mean-square normalisation (Zhang and Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.layers.linear import parameter


class RMSNorm(nnx.Module):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis; weight [size] is float32.

    offset 1 is Gemma's convention, whose files hold the weights minus one. Norm weights stay
    float32 in low-precision models, too: they are small and 1 + w would lose bits.
    """

    def __init__(
        self, size: int, *, eps: float, offset: float, axis: str, rngs: nnx.Rngs | None
    ) -> None:
        init = "ones" if offset == 0.0 else "zeros"
        self.weight = parameter(rngs, (size,), jnp.float32, (axis,), init)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight: jax.Array = self.weight[...]
        return (wide * (self.offset + weight)).astype(x.dtype)
