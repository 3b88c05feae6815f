"""The grouped product by `jax.lax.ragged_dot`, which TPUs compute without touching other groups.

Only on TPUs: on CPUs XLA multiplies every row with every group, and so it does on GPUs (as of
jax 0.10). Weights must be [X, D, F]: of [X, F, D] the compiler for TPUs makes a turned copy of
all experts in every step (940 MB for one matrix of Mixtral's, by `memory_analysis`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

DTYPES = ("bfloat16", "float32")


def refusals(*, platform: str, dtype: DTypeLike) -> list[str]:
    """Why this implementation cannot do such a call; empty when it can."""
    reasons = []
    if platform != "tpu":
        reasons.append(f"on {platform} XLA computes every group for every row")
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"{name} is not among {', '.join(DTYPES)}")
    return reasons


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """As `reference.grouped_matmul`; bfloat16 products are summed in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.ragged_dot(
        x,
        weights,
        group_sizes.astype(jnp.int32),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    padding = jnp.arange(x.shape[0]) >= jnp.sum(group_sizes)
    return jnp.where(padding[:, None], 0.0, out).astype(x.dtype)
