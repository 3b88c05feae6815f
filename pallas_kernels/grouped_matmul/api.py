"""The grouped matrix product: what a mixture of experts calls (step 6).

choice = dispatch.choose("grouped_matmul", platform=..., dtype=...)
out = grouped_matmul(x, weights, group_sizes, implementation=choice)
"""

from __future__ import annotations

import importlib

import jax

from pallas_kernels.dispatch import Choice


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: Choice | str,
) -> jax.Array:
    """x [T, D], weights [X, D, F], group_sizes [X] int32 -> [T, F] in x's dtype.

    Rows stand in order of their groups; rows behind the last group are padding and give zeros.
    group_sizes must not be negative nor sum to more than T. A row's result depends on that row
    and its group's matrix only. Raises ValueError when shapes or dtypes contradict one another.
    """
    problems = [
        (x.ndim != 2 or weights.ndim != 3, f"x {x.shape} must be [T, D], weights [X, D, F]"),
        (x.shape[-1] != weights.shape[1], f"x {x.shape} and weights {weights.shape} differ in D"),
        (x.dtype != weights.dtype, f"x is {x.dtype}, weights are {weights.dtype}"),
        (group_sizes.shape != weights.shape[:1], f"group_sizes is {group_sizes.shape}"),
    ]
    found = [text for wrong, text in problems if wrong]
    if found:
        raise ValueError(f"grouped_matmul: {'; '.join(found)}")
    name = implementation.implementation if isinstance(implementation, Choice) else implementation
    module = importlib.import_module(f"pallas_kernels.grouped_matmul.{name}")
    out: jax.Array = module.grouped_matmul(x, weights, group_sizes)
    return out
