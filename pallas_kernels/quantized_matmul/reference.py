"""Definition of the product with a quantised weight, in plain jnp (step 6).

    out[m, n] = sum over k of x[m, k] * weight[n, k]

with `weight` as `QuantizedWeight` says. What is rounded: activations, where the scheme says so, as
`quantize.round_integers` and `round_fp8` do; products of integers are added exactly within a group,
and everything else is float32; the result is rounded once to its dtype. Nothing else is rounded:
an implementation may add in another order, not in another precision. A row of x that holds NaN or
infinity gives a row that is not finite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.quantize import (
    dequantize,
    round_fp8,
    round_integers,
    whole_values,
)
from pallas_kernels.quantized_matmul.scheme import SCALE_DTYPES, QuantizedWeight, Scheme


def refusals(
    *,
    platform: str,
    dtype: DTypeLike,
    scheme: Scheme,
    out_size: int,
    in_size: int,
) -> list[str]:
    """What has no meaning; platform and sizes make no difference."""
    reasons = []
    if not jnp.issubdtype(dtype, jnp.floating):
        reasons.append(f"x of {jnp.dtype(dtype).name} is not floating-point numbers")
    if in_size % scheme.group_size(in_size):
        reasons.append(f"groups of {scheme.group} do not fill rows of {in_size}")
    assert scheme.scale_dtype in SCALE_DTYPES
    return reasons


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    scheme: Scheme,
    *,
    out_dtype: DTypeLike,
) -> jax.Array:
    """x [M, K] times weight [N, K] transposed: [M, N] of out_dtype."""
    match scheme.activations:
        case "float":
            out = _dot(x.astype(jnp.float32), dequantize(weight, scheme))
        case "fp8_token":
            values, scales = round_fp8(x)
            whole = dequantize(weight, scheme)
            out = _dot(values.astype(jnp.float32), whole) * scales[:, None]
        case "int8_token":
            values, scales = round_integers(x, "int8")
            out = _grouped_dot(_in_groups(values, weight), weight, scheme)
            out = out * scales[:, None]
        case "int8_group" | "int16_group":
            dtype = scheme.activations.removesuffix("_group")
            values, scales = round_integers(_in_groups(x, weight), dtype)
            out = _grouped_dot(values, weight, scheme, scales)
    return out.astype(out_dtype)


def _in_groups(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x [M, K] as [M, G, g]."""
    rows, in_size = x.shape
    groups = weight.scales.shape[1]
    return x.reshape(rows, groups, in_size // groups)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(
        x,
        y,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _grouped_dot(
    x: jax.Array, weight: QuantizedWeight, scheme: Scheme, scales: jax.Array | None = None
) -> jax.Array:
    """float32 [M, N] of int8 or int16 x [M, G, g]; one group after the other.

    scales [M, G]: of x per group. A group's product of integers is exact:

        sum over k of x * (value - zero) = (sum of x * value) - zero * (sum of x)
    """
    rows, groups, size = x.shape
    values = whole_values(weight.values, scheme).astype(x.dtype).reshape(-1, groups, size)

    def add(group: jax.Array, out: jax.Array) -> jax.Array:
        inputs, own = x[:, group], values[:, group]
        product = lax.dot_general(
            inputs, own, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        ).astype(jnp.float32)
        if weight.zeros is not None:
            total = inputs.astype(jnp.int32).sum(-1).astype(jnp.float32)
            product -= total[:, None] * weight.zeros[:, group].astype(jnp.float32)
        product *= weight.scales[:, group].astype(jnp.float32)
        return out + (product if scales is None else product * scales[:, group, None])

    start = jnp.zeros((rows, len(values)), jnp.float32)
    out: jax.Array = lax.fori_loop(0, groups, add, start)
    return out
