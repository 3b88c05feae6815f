"""NVIDIA GPUs that are not here, as targets for the compiler (step 6b).

XLA's CUDA plugin holds the whole compiler and needs no GPU to compile for one: it takes a
description of the device as text. A process that compiles this way calls `prepare_environment`
before jax starts its backends; its default device stays the CPU. Must not know jaxserve.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from pallas_kernels.errors import KernelError

if TYPE_CHECKING:
    from jax.experimental.topologies import TopologyDescription

#: The first compute capabilities whose tensor cores know bfloat16, and that know float8.
BFLOAT16, FLOAT8 = (8, 0), (8, 9)
#: One of them has to be installed, beside jax, to compile for NVIDIA GPUs; no driver, no CUDA.
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
PIP_COMMAND = "pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPUTarget:
    """What the compiler asks about a GPU.

    cores: streaming multiprocessors. memory_bytes: about what CUDA reports, which is less than
    the data sheet's. bandwidth: bytes per second, as in the data sheet. Limits of threads,
    registers and shared memory are those of compute capabilities 9.0 and 10.0 in NVIDIA's CUDA
    C++ Programming Guide.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes_per_core: int = 228 * 1024
    shared_bytes_per_block: int = 227 * 1024

    @property
    def description(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {self.shared_bytes_per_block}
  shared_memory_per_core: {self.shared_bytes_per_core}
  core_count: {self.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {self.name.upper()}"
"""


#: SXM modules; data sheets: H100 80 GB 3.35 TB/s, H200 141 GB 4.8 TB/s, B200 180 GB 8 TB/s.
TARGETS: Mapping[str, GPUTarget] = {
    target.name: target
    for target in (
        GPUTarget(
            name="h100",
            capability=(9, 0),
            cores=132,
            memory_bytes=79 * 2**30,
            bandwidth=3_352_000_000_000,
            l2_bytes=50 * 2**20,
            clock_ghz=1.98,
        ),
        GPUTarget(
            name="h200",
            capability=(9, 0),
            cores=132,
            memory_bytes=139 * 2**30,
            bandwidth=4_800_000_000_000,
            l2_bytes=50 * 2**20,
            clock_ghz=1.98,
        ),
        GPUTarget(
            name="b200",
            capability=(10, 0),
            cores=148,
            memory_bytes=178 * 2**30,
            bandwidth=8_000_000_000_000,
            l2_bytes=126 * 2**20,
            clock_ghz=1.965,
        ),
    )
}


def is_installed() -> bool:
    """Whether a CUDA plugin of jax is here; with or without a GPU."""
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Sets what jax reads when its backends start (pass `os.environ`), before they do.

    The plugin must not look for CUDA libraries, and must not be left out because jax was told to
    use CPUs only. Without a GPU the default backend is the CPU all the same.
    """
    environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    environment["JAX_PLATFORMS"] = ""


def gpu_topology(name: str, num_devices: int = 1) -> TopologyDescription:
    """`num_devices` GPUs of one host as targets: `.devices` are stand-ins to make a mesh of.

    name: a key of TARGETS. Compile under the mesh's abstract mesh:

        mesh = Mesh(np.array(gpu_topology("h100", 8).devices), ("tensor",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile()

    Raises KernelError for an unknown name, and where no CUDA plugin is installed or jax started
    without it (`prepare_environment`).
    """
    from jax.experimental import topologies

    if name not in TARGETS:
        raise KernelError(f"there is no GPU target {name!r}; there are {', '.join(TARGETS)}")
    if not is_installed():
        raise KernelError(
            f"compiling for {name} needs jax's CUDA plugin (no GPU is needed): {PIP_COMMAND}"
        )
    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=name,
            topology=f"1x1x{num_devices}",
            target_config=TARGETS[name].description,
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise KernelError(
            f"jax cannot compile for {name} in this process: {error}; set JAX_PLATFORMS= and "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before it starts"
        ) from error


def local_capability() -> tuple[int, int] | None:
    """Compute capability of the GPU here; None where there is none. Starts jax's backends."""
    import jax

    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def target_capability() -> int:
    """What is compiled for, as jax-triton takes it (90 for 9.0).

    That of the GPU here; else of the target whose abstract mesh is in use; else 90.
    """
    import jax

    found = local_capability()
    if found is None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        kind = "" if device is None else str(device.device_kind)
        names = {f"NVIDIA {name.upper()}": target for name, target in TARGETS.items()}
        found = names[kind].capability if kind in names else (9, 0)
    return 10 * found[0] + found[1]


def capability_refusals(*, needed: tuple[int, int]) -> list[str]:
    """Why the GPU here, if there is one, is too old for what needs this compute capability."""
    found = local_capability()
    if found is None or found >= needed:
        return []
    has, needs = (f"{major}.{minor}" for major, minor in (found, needed))
    return [f"this GPU has compute capability {has}, and it needs {needs}"]
