"""The compiled step: one program per bucket, from token ids to sampled tokens (steps 6 and 7).

A program takes (weights, pages, sampling state, packed inputs) and returns (pages, sampling state,
result). Pages and state are donated, so they are updated in place; all else of a step's inputs
travels in one packed array, so that no value and no request recompiles anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.config import ModelConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.packing import Field, PackedLayout
from jaxserve.layers.attention import PagedAttend, PagedAttentionOp
from jaxserve.parallel.mesh import sharding
from jaxserve.sampling.arrays import SampleRows
from jaxserve.sampling.sampler import SampleResult, sample_step
from jaxserve.sampling.state import SamplingState
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, row_positions

Weights = tuple[jax.Array, ...]
StepFunction = Callable[
    [Weights, KVPages, SamplingState, jax.Array], tuple[KVPages, SamplingState, SampleResult]
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """All that a program's shapes depend on beside the model."""

    bucket: Bucket
    pages_per_sequence: int


def step_layout(shape: StepShape) -> PackedLayout:
    """The packed inputs of a step.

    token_ids: [T]; a value below 0 means: the token sampled last in slot -1 - value.
    cu_q_lens [R + 1], kv_lens [R], block_tables [R, pages_per_sequence]: see PagedBatch.
    last_rows: [R], the flat index of each row's last query token.
    sample_ints, sample_floats: see SampleRows.
    """
    tokens, rows = shape.bucket.tokens, shape.bucket.rows
    return PackedLayout(
        {
            "token_ids": Field(shape=(tokens,), dtype="int32"),
            "cu_q_lens": Field(shape=(rows + 1,), dtype="int32"),
            "kv_lens": Field(shape=(rows,), dtype="int32"),
            "last_rows": Field(shape=(rows,), dtype="int32"),
            "sample_ints": Field(shape=(rows, 6), dtype="int32"),
            "sample_floats": Field(shape=(rows, 6), dtype="float32"),
            "block_tables": Field(shape=(rows, shape.pages_per_sequence), dtype="int32"),
        }
    )


def make_step(
    config: ModelConfig,
    graphdef: nnx.GraphDef[Any],
    treedef: Any,
    mesh: Mesh,
    op: PagedAttentionOp,
    shape: StepShape,
) -> StepFunction:
    """The function of one bucket; treedef turns the flat weights back into the module's state."""
    layout = step_layout(shape)

    def step(
        weights: Weights, pages: KVPages, sampling: SamplingState, packed: jax.Array
    ) -> tuple[KVPages, SamplingState, SampleResult]:
        inputs = layout.unpack(packed)
        decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        batch = PagedBatch(inputs["block_tables"], inputs["cu_q_lens"], inputs["kv_lens"])
        with jax.named_scope("feed_back"):
            token_ids = inputs["token_ids"]
            fed_back = sampling.last_token[jnp.maximum(-1 - token_ids, 0)]
            token_ids = jnp.where(token_ids < 0, fed_back, token_ids)
        _, positions, _ = row_positions(batch, shape.bucket.tokens)
        attend = PagedAttend(pages, batch, mesh, op, num_layers=config.num_layers)
        hidden = decoder(token_ids, positions, attend)
        logits = decoder.logits(hidden[inputs["last_rows"]])
        with jax.named_scope("sample"):
            rows = SampleRows(inputs["sample_ints"], inputs["sample_floats"])
            logits = jax.lax.with_sharding_constraint(  # type: ignore[no-untyped-call]
                logits, sharding(mesh, (None, None))
            )
            result, sampling = sample_step(logits, sampling, rows)
        return attend.pages, sampling, result

    return step


def step_arguments(
    mesh: Mesh, shape: StepShape, weights: Any, pages: Any, sampling: Any
) -> tuple[Any, ...]:
    """Stand-ins for a step's arguments; the given ones are arrays or stand-ins themselves."""
    packed = abstract((step_layout(shape).size,), jnp.int32, sharding(mesh, ()))
    return (*jax.tree.map(to_abstract, (weights, pages, sampling)), packed)


def compile_step(step: StepFunction, mesh: Mesh, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    """Lowers and compiles a bucket's step from `step_arguments`; touches no data."""
    replicated = sharding(mesh, ())
    pages = jax.tree.map(lambda leaf: leaf.sharding, arguments[1])
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=(pages, replicated, replicated))
    return jitted.lower(*arguments).compile()


def abstract(
    shape: tuple[int, ...], dtype: DTypeLike, place: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    """An array's shape, dtype and sharding without the array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # type: ignore[no-untyped-call]


def to_abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array (or of its stand-in)."""
    return abstract(array.shape, array.dtype, array.sharding)
