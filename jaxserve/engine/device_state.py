"""What lives on the device: the loaded model, the page pool and the sampling state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.programs import Weights, abstract
from jaxserve.parallel.mesh import sharding
from jaxserve.quantization.weights import Quantization
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.state import SamplingState, make_state
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention.api import KVPages, make_pages, pool_leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its mesh; graphdef and treedef turn the flat weights back into the module.

    attention: the implementation that reads and writes its pages, which hold page_dtype.
    sampling: the implementation of the op `sample`. quantization: None where weights are of dtype.
    products: implementations that multiply plain weights.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: np.dtype
    page_dtype: np.dtype
    graphdef: nnx.GraphDef[Any]
    treedef: Any
    weights: Weights
    attention: Choice | str = dispatch.REFERENCE
    sampling: Choice | str = dispatch.REFERENCE
    quantization: Quantization | None = None
    products: frozenset[str] = frozenset()


def device_state_maker(
    config: EngineConfig, device: LoadedModel, num_pages: int
) -> Callable[[], tuple[KVPages, SamplingState]]:
    """Makes zeroed pages of all layers and a fresh sampling state, placed on the mesh.

    May be called again after a failed step; later calls compile nothing.
    """
    stand_ins, sampling = abstract_device_state(config, device, num_pages)
    make_sampling = jax.jit(
        functools.partial(
            make_state, config.max_num_seqs, device.config.vocab_size, SamplingLimits()
        ),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, sampling),
    )

    def make() -> tuple[KVPages, SamplingState]:
        pages = make_pages(
            device.config.num_layers * num_pages,
            device.config.num_kv_heads,
            config.page_size,
            device.config.head_size,
            device.page_dtype,
            implementation=device.attention,
            sharding=stand_ins.k.sharding,
        )
        return pages, make_sampling()

    return make


def abstract_device_state(
    config: EngineConfig, device: LoadedModel, num_pages: int
) -> tuple[Any, Any]:
    """Stand-ins for the page pool (KVPages) and the SamplingState: shapes, dtypes, shardings."""
    model, mesh = device.config, device.mesh
    leaves = pool_leaves(
        model.num_layers * num_pages,
        model.num_kv_heads,
        config.page_size,
        model.head_size,
        device.page_dtype,
        implementation=device.attention,
    )
    place = sharding(mesh, ("pages", "kv_heads"), leaves.k.shape[:2])
    pages = jax.tree.map(lambda leaf: abstract(leaf.shape, leaf.dtype, place), leaves)
    state = jax.eval_shape(
        functools.partial(make_state, config.max_num_seqs, model.vocab_size, SamplingLimits())
    )
    replicated = sharding(mesh, ())
    sampling = jax.tree.map(lambda item: abstract(item.shape, item.dtype, replicated), state)
    return pages, sampling
