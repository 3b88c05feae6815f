"""Rows times a float32 matrix: what layers call (step 6).

    choice = dispatch.choose("float_matmul", platform=..., dtype=..., out_size=N, in_size=K)
    y = float_matmul(x, weight, implementation=choice)          # any number of rows

The number of rows M is no fact of the choice: an implementation serves all. Must not know models
or the mesh: each device runs it on its own part of the weight (`jax.shard_map`).
"""

from __future__ import annotations

import importlib

import jax

from pallas_kernels.dispatch import Choice


def float_matmul(x: jax.Array, weight: jax.Array, *, implementation: Choice | str) -> jax.Array:
    """x [M, K] times weight [N, K] transposed: float32 [M, N].

    Raises ValueError when the shapes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"float_matmul: x {x.shape} and weight {weight.shape} must be [M, K], [N, K]"
        )
    name = implementation.implementation if isinstance(implementation, Choice) else implementation
    module = importlib.import_module(f"pallas_kernels.float_matmul.{name}")
    product: jax.Array = module.float_matmul(x, weight)
    return product
