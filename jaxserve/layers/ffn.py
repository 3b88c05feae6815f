"""The gated feed-forward layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.layers.linear import Linear

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
    ) -> None:
        def make(out_size: int, out_axis: str, in_size: int, in_axis: str) -> Linear:
            return Linear(
                out_size,
                in_size,
                out_axis=out_axis,
                in_axis=in_axis,
                use_bias=use_bias,
                dtype=dtype,
                rngs=rngs,
            )

        self.gate = make(ffn_size, "ffn", hidden_size, "embed")
        self.up = make(ffn_size, "ffn", hidden_size, "embed")
        self.down = make(hidden_size, "embed", ffn_size, "ffn")
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
