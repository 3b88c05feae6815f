"""The grouped product by the library tokamax, which has kernels for NVIDIA GPUs.

tokamax is not a dependency: `pip install tokamax` beside the extra cuda12 or cuda13. Must not be
confused with that package: inside this module the name is imported absolutely.
"""

from __future__ import annotations

import importlib
import importlib.util

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

DTYPES = ("bfloat16", "float16", "float32")


def refusals(*, platform: str, dtype: DTypeLike) -> list[str]:
    """Why this implementation cannot do such a call; empty when it can."""
    reasons = []
    if platform != "gpu":
        reasons.append(f"it is for gpu, not for {platform}")
    if importlib.util.find_spec("tokamax") is None:
        reasons.append("the package tokamax is not installed")
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"{name} is not among {', '.join(DTYPES)}")
    return reasons


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """As `reference.grouped_matmul`; tokamax picks the kernel for the chip."""
    library = importlib.import_module("tokamax")
    out = library.ragged_dot(
        x,
        weights,
        group_sizes.astype(jnp.int32),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    padding = jnp.arange(x.shape[0]) >= jnp.sum(group_sizes)
    return jnp.where(padding[:, None], 0.0, out).astype(x.dtype)
