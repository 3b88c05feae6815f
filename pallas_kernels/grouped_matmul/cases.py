"""Named calls of the grouped product with shapes from real models, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """num_rows: tokens times experts per token; padding: rows of no group behind them."""

    name: str
    num_rows: int
    num_groups: int
    in_size: int
    out_size: int
    padding: int = 0
    #: None: rows fall where they will; else how many groups have any.
    busy_groups: int | None = None


def _mixtral(num_rows: int) -> Case:
    name = f"mixtral-8x7b-up-{num_rows}"
    return Case(name=name, num_rows=num_rows, num_groups=8, in_size=4096, out_size=14336)


def _qwen3(num_rows: int) -> Case:
    name = f"qwen3-30b-a3b-up-{num_rows}"
    return Case(name=name, num_rows=num_rows, num_groups=128, in_size=2048, out_size=768)


#: Full sizes: one row of experts' input weights, at decode (8 tokens) and prefill (512 tokens).
FULL: tuple[Case, ...] = (_mixtral(16), _mixtral(1024), _qwen3(64), _qwen3(4096))

SMALL: tuple[Case, ...] = (
    Case(name="even", num_rows=64, num_groups=8, in_size=48, out_size=72),
    Case(name="few-rows", num_rows=5, num_groups=16, in_size=32, out_size=24),
    Case(name="one-group", num_rows=40, num_groups=4, in_size=32, out_size=24, busy_groups=1),
    Case(name="padding", num_rows=21, num_groups=3, in_size=16, out_size=130, padding=11),
    Case(name="nothing", num_rows=0, num_groups=3, in_size=16, out_size=8, padding=8),
    Case(name="many-rows", num_rows=700, num_groups=3, in_size=24, out_size=16),
)


def make_inputs(
    case: Case, dtype: DTypeLike = jnp.float32, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, weights and group_sizes; groups without rows hold NaN."""
    rng = np.random.default_rng(seed)
    busy = case.num_groups if case.busy_groups is None else case.busy_groups
    chosen = rng.permutation(case.num_groups)[:busy]
    groups = rng.choice(chosen, case.num_rows) if case.num_rows else np.zeros(0, np.int64)
    sizes = np.bincount(groups, minlength=case.num_groups)
    x = rng.standard_normal((case.num_rows + case.padding, case.in_size), np.float32)
    weights = rng.standard_normal((case.num_groups, case.in_size, case.out_size), np.float32)
    weights[sizes == 0] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype), jnp.asarray(sizes, jnp.int32)
