"""Root-mean-square normalisation (Zhang and Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.layers.linear import parameter

#: Slices that are added one to another are so wide at least, and so many at most.
_LANES, _MOST_SLICES = 64, 16


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _mean_by_slices(x: jax.Array) -> jax.Array:
    """The mean in an order of its own: slices of the row one after the other, then halves.

    A reduction that XLA's CPU compiler (with YNNPACK) makes adds in an order that depends on the
    number of rows: a token would see other keys in a large batch than alone. This is as fast.
    """
    size = x.shape[-1]
    lanes = _LANES
    while size > lanes * _MOST_SLICES:
        lanes *= 2
    if size % lanes:
        return _mean(x)
    total = x[..., :lanes]
    for start in range(lanes, size, lanes):
        total = total + x[..., start : start + lanes]
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes : 2 * lanes]
    return total / size


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
        mean = lax.platform_dependent(wide * wide, cpu=_mean_by_slices, default=_mean)
        wide = wide * lax.rsqrt(mean + self.eps)
        weight: jax.Array = self.weight[...]
        return (wide * (self.offset + weight)).astype(x.dtype)
