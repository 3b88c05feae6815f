"""What lives on the device: the loaded model, the page pool and the sampling state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.programs import Weights, abstract
from jaxserve.parallel.mesh import sharding
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.state import SamplingState, make_state
from pallas_kernels.paged_attention.reference import KVPages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its mesh; graphdef and treedef turn the flat weights back into the module."""

    config: ModelConfig
    mesh: Mesh
    dtype: np.dtype
    graphdef: nnx.GraphDef[Any]
    treedef: Any
    weights: Weights


def make_device_state(
    config: EngineConfig, device: LoadedModel, num_pages: int
) -> tuple[KVPages, SamplingState]:
    """Zeroed pages of all layers, and a fresh sampling state, placed on the mesh."""
    stand_ins = abstract_device_state(config, device, num_pages)

    def zeros() -> tuple[KVPages, SamplingState]:
        pages = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stand_ins[0])
        return pages, make_state(config.max_num_seqs, device.config.vocab_size, SamplingLimits())

    placed = jax.tree.map(lambda leaf: leaf.sharding, stand_ins)
    made: tuple[KVPages, SamplingState] = jax.jit(zeros, out_shardings=placed)()
    return made


def abstract_device_state(
    config: EngineConfig, device: LoadedModel, num_pages: int
) -> tuple[Any, Any]:
    """Stand-ins for the page pool (KVPages) and the SamplingState: shapes, dtypes, shardings."""
    model, mesh = device.config, device.mesh
    shape = (
        model.num_layers * num_pages,
        model.num_kv_heads,
        config.page_size,
        model.head_size,
    )
    place = sharding(mesh, ("pages", "kv_heads", "page", "head"), shape)
    leaf: Any = abstract(shape, device.dtype, place)
    state = jax.eval_shape(
        functools.partial(make_state, config.max_num_seqs, model.vocab_size, SamplingLimits())
    )
    replicated = sharding(mesh, ())
    sampling = jax.tree.map(lambda item: abstract(item.shape, item.dtype, replicated), state)
    return KVPages(leaf, leaf), sampling
