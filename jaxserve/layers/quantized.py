"""Matrix products and embeddings with quantised weights (step 6).

Twins of `linear.Linear` and `linear.Embedding`, whose parameters are the arrays of a
`QuantizedWeight`. Several matrices that read the same input are one product: their rows stand in
one weight, device by device, so that each device holds its part of every one of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.parallel.mesh import REPLICATED_IF_UNEVEN, LogicalAxes, tensor_parallel_size
from jaxserve.quantization.weights import WeightFormat, is_split, multiply, take_rows
from pallas_kernels.quantized_matmul.api import abstract_packed
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight

#: What stands in a parameter's metadata instead of the name of its start values.
QUANTIZED = "quantized"
#: Names and sizes of matrices whose rows share one weight.
Parts = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a quantised weight is made from floats, kept with its parameters.

    out_size and in_size: of the float weight; parts: the matrices whose rows it holds, by name and
    number of rows (none: the module's own).
    """

    form: WeightFormat
    out_size: int
    in_size: int
    parts: Parts = ()


def quantized_parameters(recipe: Recipe, axes: LogicalAxes) -> list[nnx.Param[jax.Array] | None]:
    """Abstract values, scales and zero points (None without): always loaded, never initialised.

    Where columns are split over devices each device's part is a weight of its own: a scale per row
    becomes one per row and device.
    """
    form, in_axis = recipe.form, axes[1]
    split = in_axis is not None and is_split(in_axis)
    devices = tensor_parallel_size(form.mesh) if split else 1
    part = abstract_packed(
        recipe.out_size, recipe.in_size // devices, form.scheme, implementation=form.implementation
    )

    def param(leaf: jax.Array) -> nnx.Param[jax.Array]:
        shape = (leaf.shape[0], leaf.shape[1] * devices)
        whole: Any = jax.ShapeDtypeStruct(shape, leaf.dtype)  # type: ignore[no-untyped-call]
        return nnx.Param(whole, logical_axes=axes, init=QUANTIZED, recipe=recipe)

    return [None if leaf is None else param(leaf) for leaf in part]


class QuantizedLinear(nnx.Module):  # type: ignore[misc]
    """A quantised weight [out, in] and, where asked for, bias [out].

    parts: where the rows come from, if not from the module of this name.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        *,
        out_axis: str,
        in_axis: str,
        use_bias: bool,
        form: WeightFormat,
        parts: Parts = (),
    ) -> None:
        recipe = Recipe(form=form, out_size=out_size, in_size=in_size, parts=parts)
        made = quantized_parameters(recipe, (out_axis, in_axis))
        self.values, self.scales, self.zeros = made
        shape: Any = jax.ShapeDtypeStruct((out_size,), jnp.float32)  # type: ignore[no-untyped-call]
        self.bias = (
            nnx.Param(shape, logical_axes=(out_axis,), init="zeros", recipe=recipe)
            if use_bias
            else None
        )
        self.out_axis, self.in_axis, self.form = out_axis, in_axis, form

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in] -> [T, out], in x's dtype."""
        weight = _weight(self.values, self.scales, self.zeros)
        out = multiply(x, weight, self.out_axis, self.in_axis, self.form)
        if self.bias is not None:
            out = out + self.bias[...]
        return out.astype(x.dtype)


class QuantizedLinears(nnx.Module):  # type: ignore[misc]
    """Several linear layers of the same input as one product.

    parts: name and output size of each. Rows are ordered by device, and by part within a device.
    """

    def __init__(
        self,
        parts: Parts,
        in_size: int,
        *,
        out_axis: str,
        in_axis: str,
        use_bias: bool,
        form: WeightFormat,
    ) -> None:
        self.fused = QuantizedLinear(
            sum(size for _, size in parts),
            in_size,
            out_axis=out_axis,
            in_axis=in_axis,
            use_bias=use_bias,
            form=form,
            parts=parts,
        )
        self.parts = parts

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """x [T, in] -> one array [T, size] per part, in x's dtype."""
        out, fused = self.fused(x), self.fused
        devices = tensor_parallel_size(fused.form.mesh) if is_split(fused.out_axis) else 1
        by_device = out.reshape(out.shape[0], devices, -1)
        found, start = [], 0
        for _, size in self.parts:
            share = size // devices
            part = by_device[:, :, start : start + share]
            found.append(part.reshape(out.shape[0], size))
            start += share
        return tuple(found)


class QuantizedEmbedding(nnx.Module):  # type: ignore[misc]
    """One row per token id; also the output head of tied models."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, form: WeightFormat
    ) -> None:
        recipe = Recipe(form=form, out_size=vocab_size, in_size=hidden_size)
        self.values, self.scales, self.zeros = quantized_parameters(recipe, ("vocab", "embed"))
        whole = vocab_size % tensor_parallel_size(form.mesh) != 0
        assert not whole or "vocab" in REPLICATED_IF_UNEVEN
        self.split = not whole
        self.dtype, self.form = dtype, form

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids [T] int32, each below V -> [T, D]."""
        weight = _weight(self.values, self.scales, self.zeros)
        return take_rows(weight, token_ids, self.form, split=self.split).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 [R, V]."""
        weight = _weight(self.values, self.scales, self.zeros)
        axis = "vocab" if self.split else "embed"
        return multiply(hidden, weight, axis, "embed", self.form)


def _weight(
    values: nnx.Param[jax.Array] | None,
    scales: nnx.Param[jax.Array] | None,
    zeros: nnx.Param[jax.Array] | None,
) -> QuantizedWeight:
    assert values is not None
    assert scales is not None
    return QuantizedWeight(values[...], scales[...], None if zeros is None else zeros[...])
