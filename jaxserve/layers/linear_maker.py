"""Makes linear layers, plain or quantised, for the layers that are built of them (before step 1).

The one place that knows both kinds. A layer says sizes and axes and calls what it gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.layers.linear import Embedding, Linear, Linears
from jaxserve.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedLinears
from jaxserve.quantization.weights import WeightFormat

Product = Callable[[jax.Array], jax.Array]
Products = Callable[[jax.Array], tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearMaker:
    """dtype: of plain weights and of activations; rngs None makes abstract layers; form None: plain."""

    dtype: DTypeLike
    rngs: nnx.Rngs | None
    form: WeightFormat | None

    def one(
        self, out_size: int, in_size: int, *, out_axis: str, in_axis: str, use_bias: bool
    ) -> Product:
        """A layer [T, in] -> [T, out]."""
        if self.form is not None:
            return QuantizedLinear(
                out_size,
                in_size,
                out_axis=out_axis,
                in_axis=in_axis,
                use_bias=use_bias,
                form=self.form,
            )
        return Linear(
            out_size,
            in_size,
            out_axis=out_axis,
            in_axis=in_axis,
            use_bias=use_bias,
            dtype=self.dtype,
            rngs=self.rngs,
        )

    def several(
        self,
        parts: tuple[tuple[str, int], ...],
        in_size: int,
        *,
        out_axes: tuple[str, ...],
        in_axis: str,
        use_bias: bool,
    ) -> Products:
        """Layers of one input, named and sized by parts: [T, in] -> a tuple of [T, size]."""
        if self.form is not None:
            return QuantizedLinears(
                parts,
                in_size,
                out_axis=out_axes[0],
                in_axis=in_axis,
                use_bias=use_bias,
                form=self.form,
            )
        made: dict[str, Linear] = {}
        for (name, size), out_axis in zip(parts, out_axes, strict=True):
            made[name] = Linear(
                size,
                in_size,
                out_axis=out_axis,
                in_axis=in_axis,
                use_bias=use_bias,
                dtype=self.dtype,
                rngs=self.rngs,
            )
        return Linears(made)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding | QuantizedEmbedding:
        """An embedding, which may be the output head as well."""
        if self.form is not None:
            return QuantizedEmbedding(vocab_size, hidden_size, dtype=self.dtype, form=self.form)
        return Embedding(vocab_size, hidden_size, dtype=self.dtype, rngs=self.rngs)
