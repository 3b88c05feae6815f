"""Which implementation multiplies plain float weights (before step 1).

With a few rows XLA for CPUs copies each matrix before it multiplies; `float_matmul` reads it once.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.layers.linear import choose_products
from jaxserve.parallel.mesh import tensor_parallel_size
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError


def choose_float_products(
    decoder: nnx.Module, mesh: Mesh, dtype: np.dtype, kernels: str
) -> frozenset[str]:
    """Sets the implementation of every plain product of a model, and returns those in use.

    kernels: as `dispatch.choose` takes it. Weights that are split over devices stay with XLA, which
    partitions its own products only.
    """

    def choose(out_size: int, in_size: int) -> str:
        if tensor_parallel_size(mesh) > 1:
            return dispatch.REFERENCE
        try:
            choice = dispatch.choose(
                "float_matmul",
                platform=mesh.devices.flat[0].platform,
                kernels=kernels,
                dtype=jnp.dtype(dtype),
                out_size=out_size,
                in_size=in_size,
            )
        except KernelError:  # one implementation was asked for, which cannot do this size
            return dispatch.REFERENCE
        return choice.implementation

    return choose_products(decoder, choose)
