"""TPUs that are not here, as targets for the compiler (step 6b).

`libtpu` holds the whole compiler and needs no TPU to compile for one. A process that compiles this
way calls `prepare_environment` before libtpu is loaded; its default device stays the CPU. Must
not know jaxserve.
"""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pallas_kernels.errors import KernelError

if TYPE_CHECKING:
    from jax.experimental.topologies import TopologyDescription

PIP_COMMAND = "pip install 'jax[tpu]'"


def is_installed() -> bool:
    """Whether libtpu is here; with or without a TPU."""
    return importlib.util.find_spec("libtpu") is not None


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Sets what jax and libtpu read when they are loaded (pass `os.environ`), before they are.

    Without these libtpu would look for the machine it runs on, and ask a cloud who that is.
    Raises KernelError where libtpu is not installed.
    """
    if not is_installed():
        raise KernelError(f"compiling for a TPU needs libtpu (no TPU is needed): {PIP_COMMAND}")
    import libtpu

    environment["JAX_PLATFORMS"] = "cpu"
    environment["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    environment["TPU_SKIP_MDS_QUERY"] = "1"
    environment["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
    environment["TPU_WORKER_HOSTNAMES"] = "localhost"
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # or two processes fight for a lock file


def tpu_topology(name: str) -> TopologyDescription:
    """The chips of a slice ("v5e:2x4", "tpu7x:2x2x1") as targets: `.devices` make a mesh.

    A generation's smallest slice may be a single chip ("v6e:1x1"). Compile under the mesh's
    abstract mesh, or Pallas asks the local device for its generation:

        mesh = Mesh(np.array(tpu_topology("v6e:2x4").devices), ("tensor",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()

    Raises KernelError where libtpu is missing or knows no such slice.
    """
    from jax.experimental import topologies

    if not is_installed():
        raise KernelError(f"compiling for {name} needs libtpu (no TPU is needed): {PIP_COMMAND}")
    sides = name.partition(":")[2].split("x")
    # A host has 2 by 2 chips unless it is told otherwise.
    single = {"chips_per_host_bounds": [1, 1, 1]} if set(sides) == {"1"} else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **single)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise KernelError(f"libtpu cannot compile for {name}: {error}") from error
