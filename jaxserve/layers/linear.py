"""Matrix products and embeddings: the parameters' makers and the one function that multiplies.

Weights are two-dimensional [out, in], as Hugging Face stores them, so that loading is a copy and
no layout change costs a temporary. Every product of the model goes through `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.parallel.mesh import LogicalAxes
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.float_matmul.api import float_matmul

#: Standard deviation of a weight's start values.
INIT_SCALE = 0.02
#: Start values by name; the name is kept with the parameter so that it can be made elsewhere.
INITIALIZERS: dict[str, nnx.Initializer] = {
    "normal": jax.nn.initializers.normal(INIT_SCALE),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}


def parameter(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    logical_axes: LogicalAxes,
    init: str = "normal",
) -> nnx.Param[jax.Array]:
    """A parameter that carries the logical names of its axes and the name of its start values.

    rngs None makes an abstract one: its value is a `jax.ShapeDtypeStruct`.
    """
    assert len(shape) == len(logical_axes)
    value: jax.Array | jax.ShapeDtypeStruct
    if rngs is None:
        value = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
    else:
        value = INITIALIZERS[init](rngs.params(), shape, dtype)
    return nnx.Param(value, logical_axes=logical_axes, init=init)


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str = REFERENCE,
) -> jax.Array:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out].

    Sums are float32. float32 weights are multiplied in full float32 on every platform.
    out_dtype None: x's dtype. implementation: of the op `float_matmul`.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = float_matmul(rows, weight, implementation=implementation)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype if out_dtype is None else out_dtype)


class Linear(nnx.Module):  # type: ignore[misc]
    """weight [out, in] and, where asked for, bias [out]; see `choose_products`."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        *,
        out_axis: str,
        in_axis: str,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.weight = parameter(rngs, (out_size, in_size), dtype, (out_axis, in_axis))
        self.bias = parameter(rngs, (out_size,), dtype, (out_axis,), "zeros") if use_bias else None
        self.implementation = REFERENCE

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return linear(x, self.weight[...], bias, implementation=self.implementation)


class Linears(nnx.Module):  # type: ignore[misc]
    """Several linear layers of the same input, each by its name."""

    def __init__(self, parts: Mapping[str, Linear]) -> None:
        self.names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """x [..., in] -> one array [..., out] each, in x's dtype."""
        return tuple(getattr(self, name)(x) for name in self.names)


class Embedding(nnx.Module):  # type: ignore[misc]
    """weight [V, D]: one row per token id; also the output head of tied models."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = parameter(rngs, (vocab_size, hidden_size), dtype, ("vocab", "embed"))
        self.implementation = REFERENCE

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids [T] int32, each below V -> [T, D]."""
        weight: jax.Array = self.weight[...]
        return weight.at[token_ids].get(mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 [R, V]."""
        weight = self.weight[...]
        return linear(hidden, weight, out_dtype=jnp.float32, implementation=self.implementation)


def choose_products(model: nnx.Module, choose: Callable[[int, int], str]) -> frozenset[str]:
    """Gives every plain product of a model the implementation that `choose(out, in)` names.

    They start with the definition. Returns the names in use; none for a model without such products.
    """
    found = set()
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Embedding):
            module.implementation = choose(*module.weight.shape)
            found.add(module.implementation)
    return frozenset(found)
