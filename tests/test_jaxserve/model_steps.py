"""Runs a decoder the way the engine does, only simpler: dense, or in chunks through pages."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints.reader import CheckpointReader
from checkpoints.safetensors_reader import SafetensorsReader
from jaxserve.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.layers.attention import DenseAttend, PagedAttend
from jaxserve.models.decoder import Decoder
from jaxserve.parallel.mesh import sharding
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, paged_attention

PAGE_SIZE = 4
#: Rows of a step; chunks are smaller and leave padding.
ROWS = 24
#: Compiling takes most of the time of these tests; the results are the same.
COMPILER_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}


class ChangedConfig:
    """A checkpoint whose config.json is another one."""

    def __init__(self, reader: CheckpointReader, config: Mapping[str, Any]) -> None:
        self._reader = reader
        self.convention = reader.convention
        self.config = config
        self.tensors = reader.tensors
        self.read = reader.read
        self.tokenizer_files = reader.tokenizer_files


def open_golden(folder: pathlib.Path, config_name: str = "config.json") -> CheckpointReader:
    """One of the tiny golden checkpoints, under either spelling of its configuration."""
    reader = SafetensorsReader(folder, folder / "model.safetensors")
    return ChangedConfig(reader, json.loads((folder / config_name).read_text()))


def make_config(**changes: Any) -> ModelConfig:
    """A tiny Llama whose sizes divide by 4."""
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_size": 8,
        "ffn_size": 48,
        "max_position": 256,
        **changes,
    }
    rope = RopeConfig(theta=10_000.0, rotary_dim=values["head_size"])
    values.setdefault("layers", (LayerConfig(window=None, rope=rope),) * values["num_layers"])
    return ModelConfig(**values)


def dense_logits(decoder: Decoder, sequences: list[list[int]]) -> list[np.ndarray]:
    """Logits float32 [T, V] of each sequence, whole and alone."""
    graph, state = nnx.split(decoder)

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def run(state: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return model.logits(model(tokens, jnp.arange(tokens.shape[0]), DenseAttend()))

    rows = max(len(sequence) for sequence in sequences)
    return [
        np.asarray(run(state, jnp.array(sequence + [0] * (rows - len(sequence)), jnp.int32)))[
            : len(sequence)
        ]
        for sequence in sequences
    ]


def make_pages(config: ModelConfig, mesh: Mesh, num_pages: int, fill: float) -> KVPages:
    """A pool for all layers, every value `fill`."""
    shape = (config.num_layers * num_pages, config.num_kv_heads, PAGE_SIZE, config.head_size)
    place = sharding(mesh, ("pages", "kv_heads", "page", "head"), shape)
    leaf = np.full(shape, fill, np.float32)
    return KVPages(jax.device_put(leaf, place), jax.device_put(leaf, place))


def paged_logits(
    decoder: Decoder, mesh: Mesh, prompts: list[list[int]], chunks: list[int]
) -> list[np.ndarray]:
    """Logits of every position of every prompt, all prompts in one ragged batch.

    Each step takes the next size of `chunks` (cyclic) from each prompt in turn. Pages are handed
    out in a scrambled order and start as NaN, so that a read of a page not owned shows.
    """
    config: ModelConfig = decoder.config
    graph, state = nnx.split(decoder)
    needed = [-(-len(prompt) // PAGE_SIZE) for prompt in prompts]
    num_pages = 1 + sum(needed)
    order = np.random.default_rng(0).permutation(np.arange(1, num_pages)).tolist()
    tables = np.zeros((len(prompts), max(needed)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = [order.pop() for _ in range(count)]

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def run(
        state: Any, pages: KVPages, tokens: jax.Array, positions: jax.Array, batch: PagedBatch
    ) -> tuple[jax.Array, KVPages]:
        model = nnx.merge(graph, state)
        attend = PagedAttend(pages, batch, mesh, paged_attention, num_layers=config.num_layers)
        hidden = model(tokens, positions, attend)
        return model.logits(hidden), attend.pages

    pages = make_pages(config, mesh, num_pages, np.nan)
    done = [0] * len(prompts)
    out: list[list[np.ndarray]] = [[] for _ in prompts]
    turn = 0
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        tokens, positions = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        starts, begins = [0], list(done)
        for row, prompt in enumerate(prompts):
            size = min(chunks[turn % len(chunks)], len(prompt) - done[row], ROWS - starts[-1])
            turn += 1
            span = slice(starts[-1], starts[-1] + size)
            tokens[span] = prompt[done[row] : done[row] + size]
            positions[span] = np.arange(done[row], done[row] + size)
            done[row] += size
            starts.append(starts[-1] + size)
        lengths = [end if end > begin else 0 for begin, end in zip(begins, done, strict=True)]
        batch = PagedBatch(
            jnp.array(tables), jnp.array(starts, jnp.int32), jnp.array(lengths, jnp.int32)
        )
        logits, pages = run(state, pages, jnp.array(tokens), jnp.array(positions), batch)
        for row, pieces in enumerate(out):
            pieces.append(np.asarray(logits[starts[row] : starts[row + 1]]))
    return [np.concatenate(pieces) for pieces in out]
