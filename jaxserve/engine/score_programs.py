"""Compiled programs that read a prompt without answering it (step 6): embeddings, log-probabilities.

Made only when the engine is asked to (`--embeddings`, `--prompt-logprobs`), before it says ready.
They have pages of their own, enough for one longest prompt: what they read is needed no longer than
the prompt is, and no answer ever loses a page to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxserve.config import EngineConfig
from jaxserve.engine.device_state import LoadedModel, abstract_device_state
from jaxserve.engine.packing import Field, PackedLayout
from jaxserve.engine.program_store import ProgramStore
from jaxserve.engine.programs import Weights, abstract, to_abstract
from jaxserve.layers.attention import PagedAttend, PagedAttentionOp
from jaxserve.parallel.mesh import sharding
from jaxserve.request import MAX_LOGPROBS
from pallas_kernels.paged_attention.api import make_pages
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, row_positions
from pallas_kernels.sample import api as sample

#: Prompts of one step.
MAX_ROWS = 16
_SMALL = 64
#: Positions whose logits exist at the same time.
_BLOCK = 32
EMBED, LOGPROBS = "embed", "logprobs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreShape:
    """What a program's shapes depend on beside the model: T query tokens, R prompts, its pool."""

    tokens: int
    rows: int
    pages_per_sequence: int

    @property
    def num_pages(self) -> int:
        """Of the pool: one longest prompt and a page more for each prompt; page 0 is nobody's."""
        return 1 + self.pages_per_sequence + self.rows

    @property
    def layout(self) -> PackedLayout:
        """The packed inputs; targets: the token that follows each query token in the prompt."""
        tokens, rows = self.tokens, self.rows
        return PackedLayout(
            {
                "token_ids": Field(shape=(tokens,), dtype="int32"),
                "targets": Field(shape=(tokens,), dtype="int32"),
                "cu_q_lens": Field(shape=(rows + 1,), dtype="int32"),
                "kv_lens": Field(shape=(rows,), dtype="int32"),
                "block_tables": Field(shape=(rows, self.pages_per_sequence), dtype="int32"),
            }
        )


def score_shapes(config: EngineConfig, pages_per_sequence: int) -> tuple[ScoreShape, ...]:
    """Those that are compiled, smallest first."""
    largest = -(-config.max_num_batched_tokens // _BLOCK) * _BLOCK
    sizes = sorted({min(_SMALL, largest), largest})
    return tuple(
        ScoreShape(tokens=size, rows=MAX_ROWS, pages_per_sequence=pages_per_sequence)
        for size in sizes
    )


class ScoreDevice:
    """The programs, their pages, and the weights that they share with the engine's others."""

    def __init__(
        self,
        config: EngineConfig,
        device: LoadedModel,
        op: PagedAttentionOp,
        pages_per_sequence: int,
        kinds: tuple[str, ...],
        store: ProgramStore,
    ) -> None:
        self.shapes = score_shapes(config, pages_per_sequence)
        self.kinds = kinds
        self.page_size = config.page_size
        self._device = device
        self._config = config
        self._programs: Mapping[tuple[str, int], jax.stages.Compiled] = {
            (kind, shape.tokens): self._compile(kind, shape, op, store)
            for kind in kinds
            for shape in self.shapes
        }
        self.renew()
        for kind, tokens in self._programs:
            self.run(kind, next(shape for shape in self.shapes if shape.tokens == tokens), None)

    def renew(self) -> None:
        """New pages, after a step that failed."""
        model, places = self._device.config, self._abstract_pages().k.sharding
        self._pages = make_pages(
            model.num_layers * self.shapes[0].num_pages,
            model.num_kv_heads,
            self._config.page_size,
            model.head_size,
            self._device.page_dtype,
            implementation=self._device.attention,
            sharding=places,
        )

    def run(
        self, kind: str, shape: ScoreShape, packed: np.ndarray | None
    ) -> tuple[np.ndarray, ...]:
        """One step, waited for. packed None: of padding only.

        EMBED: sums [R, D] and last [R, D] float32 of the hidden states of each row's tokens.
        LOGPROBS: of each target [T], and top_ids [T, 20] and top_logprobs [T, 20] float32.
        """
        inputs = np.zeros(shape.layout.size, np.int32) if packed is None else packed
        program = self._programs[kind, shape.tokens]
        self._pages, *results = program(self._device.weights, self._pages, inputs)
        return tuple(np.asarray(result) for result in results)

    def _compile(
        self, kind: str, shape: ScoreShape, op: PagedAttentionOp, store: ProgramStore
    ) -> jax.stages.Compiled:
        device = self._device
        pages = self._abstract_pages()
        replicated = sharding(device.mesh, ())
        packed = abstract((shape.layout.size,), jnp.int32, replicated)
        arguments = (*jax.tree.map(to_abstract, (device.weights, pages)), packed)
        results = 2 if kind == EMBED else 3
        places = (jax.tree.map(lambda leaf: leaf.sharding, pages), *[replicated] * results)
        jitted = jax.jit(
            _make_function(kind, device, op, shape), donate_argnums=(1,), out_shardings=places
        )
        return store.get(
            f"score_{kind}_{shape.tokens}",
            arguments,
            lambda: (pages, *range(results)),
            lambda: jitted.lower(*arguments).compile(),
        )

    def _abstract_pages(self) -> Any:
        pages, _ = abstract_device_state(self._config, self._device, self.shapes[0].num_pages)
        return pages


def _make_function(
    kind: str, device: LoadedModel, op: PagedAttentionOp, shape: ScoreShape
) -> Callable[[Weights, KVPages, jax.Array], tuple[Any, ...]]:
    layout = shape.layout

    def score(weights: Weights, pages: KVPages, packed: jax.Array) -> tuple[Any, ...]:
        inputs = layout.unpack(packed)
        decoder = nnx.merge(device.graphdef, jax.tree.unflatten(device.treedef, weights))
        batch = PagedBatch(inputs["block_tables"], inputs["cu_q_lens"], inputs["kv_lens"])
        _, positions, _ = row_positions(batch, shape.tokens)
        attend = PagedAttend(pages, batch, device.mesh, op, num_layers=device.config.num_layers)
        hidden = decoder(inputs["token_ids"], positions, attend)
        if kind == EMBED:
            return attend.pages, *_pool(hidden, batch.cu_q_lens)
        implementation = device.sampling
        return attend.pages, *_logprobs(decoder, hidden, inputs["targets"], implementation)

    return score


def _pool(hidden: jax.Array, cu_q_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """hidden [T, D] -> sums and last [R, D] float32; rows without tokens hold nothing of use."""
    with jax.named_scope("pool"):
        index = jnp.arange(hidden.shape[0])
        first, end = cu_q_lens[:-1, None], cu_q_lens[1:, None]
        mine = ((index >= first) & (index < end)).astype(jnp.float32)
        wide = hidden.astype(jnp.float32)
        sums = jnp.dot(mine, wide, precision=lax.Precision.HIGHEST)
        return sums, wide[jnp.maximum(cu_q_lens[1:] - 1, 0)]


def _logprobs(
    decoder: Any, hidden: jax.Array, targets: jax.Array, implementation: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """hidden [T, D], targets [T] -> see `ScoreDevice.run`; logits of a few positions at a time."""

    def block(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = decoder.logits(part[0]).astype(jnp.float32)
        return sample.top_logprobs(logits, part[1], MAX_LOGPROBS, implementation=implementation)

    with jax.named_scope("prompt_logprobs"):
        blocks = hidden.shape[0] // _BLOCK
        parts = hidden.reshape(blocks, _BLOCK, -1), targets.reshape(blocks, _BLOCK)
        chosen, ids, values = lax.map(block, parts)
        return chosen.reshape(-1), ids.reshape(-1, MAX_LOGPROBS), values.reshape(-1, MAX_LOGPROBS)
