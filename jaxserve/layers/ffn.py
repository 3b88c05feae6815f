"""The gated feed-forward layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.layers.linear_maker import LinearMaker
from jaxserve.quantization.weights import WeightFormat

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


class FeedForward(nnx.Module):  # type: ignore[misc]
    """gate and up [F, D], down [D, F]."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        form: WeightFormat | None = None,
    ) -> None:
        make = LinearMaker(dtype=dtype, rngs=rngs, form=form)
        self.inputs = make.several(
            (("gate", ffn_size), ("up", ffn_size)),
            hidden_size,
            out_axes=("ffn", "ffn"),
            in_axis="embed",
            use_bias=use_bias,
        )
        self.down = make.one(
            hidden_size, ffn_size, out_axis="embed", in_axis="ffn", use_bias=use_bias
        )
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        gate, up = self.inputs(x)
        return self.down(ACTIVATIONS[self.activation](gate) * up)
