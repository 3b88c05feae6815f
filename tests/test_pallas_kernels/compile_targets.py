"""TPUs that are not here, as targets for the compiler (`pytest -m compile`).

`libtpu` holds the whole compiler and needs no TPU to compile for one. It reads its settings from
the environment when it is loaded; without them it would look for the machine it runs on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import tpu_targets

#: The smallest slice of each generation that has a name.
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
MEBIBYTE = 2**20


def libtpu_environment() -> dict[str, str]:
    """What has to be in the environment before libtpu is loaded, on a machine without a TPU."""
    environment: dict[str, str] = {}
    tpu_targets.prepare_environment(environment)
    return environment


@contextlib.contextmanager
def libtpu_loaded() -> Iterator[None]:
    """Sets the environment while libtpu is used; skips the test where it is not installed."""
    if not tpu_targets.is_installed():
        pytest.skip("libtpu is not installed: pip install '.[tpu,test]' compiles for TPUs anywhere")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in libtpu_environment().items():
            patch.setenv(name, value)
        yield


@functools.cache
def devices(topology: str) -> tuple[Any, ...]:
    """Stand-ins for the chips of a slice, "v5e:2x4" for example."""
    return tuple(tpu_targets.tpu_topology(topology).devices)


def one_chip(topology: str) -> Mesh:
    """A mesh of one chip of a slice."""
    return Mesh(np.array(devices(topology)[:1]), ("only",))


def on_every_chip(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array's stand-in, whole on each chip."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def compile_for(mesh: Mesh, jitted: Any, *arguments: Any) -> jax.stages.Compiled:
    """Compiles for the mesh's chips. Pallas learns of them from the abstract mesh."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile()
