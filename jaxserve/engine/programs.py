"""The compiled step: from token ids to logits, and from logits to sampled tokens (steps 6 and 7).

A step is two programs. `forward`, one per bucket, takes (weights, pages, last tokens, packed
inputs) and returns (pages, logits); `sample`, one per number of rows, takes (logits, sampling
state, packed inputs) and returns (sampling state, result). Pages and state are donated, so they are
updated in place; all else of a step's inputs travels in packed arrays, so that no value and no
request recompiles anything. They are two because most buckets share their number of rows, and
exact sampling takes the compiler longer than thirty layers.
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
from jaxserve.sampling.arrays import NUM_FLOATS, NUM_INTS, SampleRows
from jaxserve.sampling.sampler import SampleResult, sample_step
from jaxserve.sampling.state import SamplingState
from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, row_positions

Weights = tuple[jax.Array, ...]
ForwardFunction = Callable[[Weights, KVPages, jax.Array, jax.Array], tuple[KVPages, jax.Array]]
SampleFunction = Callable[[jax.Array, SamplingState, jax.Array], tuple[SamplingState, SampleResult]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """All that a forward program's shapes depend on beside the model."""

    bucket: Bucket
    pages_per_sequence: int


def forward_layout(shape: StepShape) -> PackedLayout:
    """The packed inputs of `forward`.

    token_ids: [T]; a value below 0 means: the token sampled last in slot -1 - value.
    cu_q_lens [R + 1], kv_lens [R], block_tables [R, pages_per_sequence]: see PagedBatch.
    sampled: [R], the flat indices of the query tokens after which a token is sampled.
    """
    tokens, rows = shape.bucket.tokens, shape.bucket.rows
    return PackedLayout(
        {
            "token_ids": Field(shape=(tokens,), dtype="int32"),
            "cu_q_lens": Field(shape=(rows + 1,), dtype="int32"),
            "kv_lens": Field(shape=(rows,), dtype="int32"),
            "sampled": Field(shape=(rows,), dtype="int32"),
            "block_tables": Field(shape=(rows, shape.pages_per_sequence), dtype="int32"),
        }
    )


def sample_layout(rows: int) -> PackedLayout:
    """The packed inputs of `sample`: see SampleRows."""
    return PackedLayout(
        {
            "ints": Field(shape=(rows, NUM_INTS), dtype="int32"),
            "floats": Field(shape=(rows, NUM_FLOATS), dtype="float32"),
        }
    )


def make_forward(
    config: ModelConfig,
    graphdef: nnx.GraphDef[Any],
    treedef: Any,
    mesh: Mesh,
    op: PagedAttentionOp,
    shape: StepShape,
) -> ForwardFunction:
    """`forward` of one bucket; treedef turns the flat weights back into the module's state."""
    layout = forward_layout(shape)

    def forward(
        weights: Weights, pages: KVPages, last_token: jax.Array, packed: jax.Array
    ) -> tuple[KVPages, jax.Array]:
        inputs = layout.unpack(packed)
        decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        batch = PagedBatch(inputs["block_tables"], inputs["cu_q_lens"], inputs["kv_lens"])
        with jax.named_scope("feed_back"):
            token_ids = inputs["token_ids"]
            fed_back = last_token[jnp.maximum(-1 - token_ids, 0)]
            token_ids = jnp.where(token_ids < 0, fed_back, token_ids)
        _, positions, _ = row_positions(batch, shape.bucket.tokens)
        attend = PagedAttend(pages, batch, mesh, op, num_layers=config.num_layers)
        hidden = decoder(token_ids, positions, attend)
        logits = decoder.logits(hidden[inputs["sampled"]])
        return attend.pages, _pad_rows(logits, shape.bucket.sampled)

    return forward


def _pad_rows(logits: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(logits, ((0, rows - logits.shape[0]), (0, 0)))


def make_sample(rows: int, implementation: Choice | str) -> SampleFunction:
    """`sample` for logits [rows, V]; implementation: of the op `sample`."""
    layout = sample_layout(rows)

    def sample(
        logits: jax.Array, sampling: SamplingState, packed: jax.Array
    ) -> tuple[SamplingState, SampleResult]:
        inputs = layout.unpack(packed)
        with jax.named_scope("sample"):
            result, sampling = sample_step(
                logits,
                sampling,
                SampleRows(inputs["ints"], inputs["floats"]),
                implementation=implementation,
            )
        return sampling, result

    return sample


def forward_arguments(
    mesh: Mesh, shape: StepShape, weights: Any, pages: Any, last_token: Any
) -> tuple[Any, ...]:
    """Stand-ins for the arguments of `forward`; the given ones are arrays or stand-ins."""
    packed = abstract((forward_layout(shape).size,), jnp.int32, sharding(mesh, ()))
    return (*jax.tree.map(to_abstract, (weights, pages, last_token)), packed)


def sample_arguments(mesh: Mesh, rows: int, vocab_size: int, sampling: Any) -> tuple[Any, ...]:
    """Stand-ins for the arguments of `sample`."""
    replicated = sharding(mesh, ())
    logits = abstract((rows, vocab_size), jnp.float32, replicated)
    packed = abstract((sample_layout(rows).size,), jnp.int32, replicated)
    return logits, jax.tree.map(to_abstract, sampling), packed


def compile_forward(
    forward: ForwardFunction, mesh: Mesh, arguments: tuple[Any, ...]
) -> jax.stages.Compiled:
    """Lowers and compiles from `forward_arguments`; touches no data. Logits are not split."""
    pages = jax.tree.map(lambda leaf: leaf.sharding, arguments[1])
    jitted = jax.jit(forward, donate_argnums=(1,), out_shardings=(pages, sharding(mesh, ())))
    return jitted.lower(*arguments).compile()


def compile_sample(
    sample: SampleFunction, mesh: Mesh, arguments: tuple[Any, ...]
) -> jax.stages.Compiled:
    """Lowers and compiles from `sample_arguments`; touches no data."""
    jitted = jax.jit(sample, donate_argnums=(1,), out_shardings=sharding(mesh, ()))
    return jitted.lower(*arguments).compile()


def abstract(
    shape: tuple[int, ...], dtype: DTypeLike, place: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    """An array's shape, dtype and sharding without the array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # type: ignore[no-untyped-call]


def to_abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array (or of its stand-in)."""
    return abstract(array.shape, array.dtype, array.sharding)
