"""Plain products: the kernel for a few rows is chosen, and gives what XLA gives."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.engine.product_choice import choose_float_products
from jaxserve.layers.linear import Embedding, Linear
from jaxserve.parallel.mesh import make_mesh


class Model(nnx.Module):
    def __init__(self, vocab_size: int) -> None:
        rngs = nnx.Rngs(0)
        self.embed = Embedding(vocab_size, 32, dtype=jnp.float32, rngs=rngs)
        self.inner = nnx.List(
            [
                Linear(
                    48,
                    32,
                    out_axis="embed",
                    in_axis="embed",
                    use_bias=True,
                    dtype=jnp.float32,
                    rngs=rngs,
                )
            ]
        )


def choose(model: Model, kernels: str) -> frozenset[str]:
    return choose_float_products(model, make_mesh(1), np.dtype(np.float32), kernels)


@pytest.mark.parametrize("rows", [1, 8, 17])
def test_products_of_the_kernel_equal_those_of_xla(rows: int) -> None:
    model = Model(64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 32)), jnp.float32)
    expected = model.inner[0](x), model.embed.logits(x)
    assert choose(model, "auto") == {"cpu"}
    for ours, theirs in zip((model.inner[0](x), model.embed.logits(x)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_odd_sizes_and_the_reference_stay_with_xla() -> None:
    assert choose(Model(50), "auto") == {"cpu", "reference"}
    assert choose(Model(50), "cpu") == {"cpu", "reference"}
    assert choose(Model(64), "reference") == {"reference"}
