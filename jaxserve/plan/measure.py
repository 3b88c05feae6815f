"""Compiles the engine's own step for devices that are not here, from shapes (before step 1).

The same `ProgramMaker` as in an engine, with the ops that dispatch chooses for the platform; only
the weights are stand-ins, and of many equal layers a few may stand for all (`depth.py`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.build import (
    choose_attention,
    choose_context,
    choose_dtype,
    choose_page_dtype,
    choose_sampling,
    resolve_kernels,
)
from jaxserve.engine.compiling import ProgramMaker
from jaxserve.engine.device_state import LoadedModel, abstract_device_state
from jaxserve.engine.memory import Overhead, ProgramMemory, measured_buckets, step_overhead
from jaxserve.engine.quantize_choice import named_quantization
from jaxserve.models.loading import make_abstract_model
from jaxserve.parallel.mesh import make_mesh, sharding, tensor_parallel_size
from jaxserve.plan.collectives import read_collectives
from jaxserve.plan.depth import ProgramSize, at_depth, choose_depths
from pallas_kernels.paged_attention.api import paged_attention

Key = TypeVar("Key")
Task = Callable[[], ProgramSize]

#: Compilations side by side; each takes a core and, for a large model, gigabytes.
_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One device's share of a step. decode and largest: `forward` of those buckets.

    rows: sequences in a step. depths: layers that were compiled. overhead: of an engine with all
    its programs. pool_bytes: of the pool that they were compiled with.
    """

    decode: ProgramSize
    largest: ProgramSize
    sample: ProgramSize
    rows: int
    depths: tuple[int, ...]
    num_programs: int
    num_served: int
    overhead: Overhead
    pool_bytes: int
    seconds: float


def abstract_model(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, platform: str
) -> LoadedModel:
    """The model on a mesh, its ops chosen, every weight a shape with its sharding."""
    dtype = choose_dtype(config, platform)
    page_dtype = choose_page_dtype(config, dtype, None)  # auto never quantises here
    kernels = resolve_kernels(config)
    quantization = named_quantization(config, model, mesh, platform, dtype, kernels)
    graphdef, state = nnx.split(make_abstract_model(model, dtype, quantization))
    flat = []
    for path, param in nnx.to_flat_state(state):
        value, axes = param.get_value(), param.get_metadata()["logical_axes"]
        place = sharding(mesh, axes, value.shape)
        stand_in = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place)  # type: ignore[no-untyped-call]
        flat.append((path, param.replace(stand_in)))
    weights, treedef = jax.tree.flatten(nnx.from_flat_state(flat))
    return LoadedModel(
        config=model,
        mesh=mesh,
        dtype=dtype,
        page_dtype=page_dtype,
        graphdef=graphdef,
        treedef=treedef,
        weights=tuple(weights),
        attention=choose_attention(config, model, dtype, page_dtype, platform),
        sampling=choose_sampling(config, model, platform),
        quantization=quantization,
    )


def step_maker(config: EngineConfig, device: LoadedModel, num_pages: int) -> ProgramMaker:
    """What makes the programs of an engine with such a pool."""
    _, pages_per_sequence = choose_context(config, device.config)
    return ProgramMaker(
        config=config,
        device=device,
        op=functools.partial(paged_attention, implementation=device.attention),
        pages_per_sequence=pages_per_sequence,
        num_pages=num_pages,
    )


def compile_forward(maker: ProgramMaker, bucket: Bucket) -> jax.stages.Compiled:
    """`forward` of one bucket for the mesh's devices, of which Pallas learns from the mesh."""
    with jax.sharding.use_abstract_mesh(maker.device.mesh.abstract_mesh):
        return maker.compile_bucket(bucket)


def compile_sample(maker: ProgramMaker, rows: int) -> jax.stages.Compiled:
    """`sample` for so many rows, for the mesh's devices."""
    with jax.sharding.use_abstract_mesh(maker.device.mesh.abstract_mesh):
        return maker.compile_sample(rows)


def compile_reset(maker: ProgramMaker) -> jax.stages.Compiled:
    """What renews a slot of the sampling state, for the mesh's devices."""
    with jax.sharding.use_abstract_mesh(maker.device.mesh.abstract_mesh):
        return maker.compile_reset()


def measure_step(
    config: EngineConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device],
    platform: str,
    *,
    num_pages: int,
    exact: bool,
    say: Callable[[str], None],
) -> MeasuredStep:
    """Compiles what a plan needs. num_pages: of the pool; sizes depend on it, programs do not.

    Raises UsageError, KernelError, and jax.errors.JaxRuntimeError from the compiler.
    """
    start = time.monotonic()
    mesh = make_mesh(config.tensor_parallel, devices[: config.tensor_parallel])
    buckets = make_buckets(config.max_num_batched_tokens, config.max_step_rows)
    rows = buckets[-1].rows
    measured = measured_buckets(buckets)
    depths = choose_depths(model.layers, exact=exact)
    makers = {
        depth: step_maker(
            config, abstract_model(config, shallow(model, depth), mesh, platform), num_pages
        )
        for depth in depths
    }
    tasks: dict[tuple[int, Bucket] | str, Task] = {
        "sample": functools.partial(_measure_sample, makers[depths[0]], buckets[-1].sampled, say),
        "reset": functools.partial(_measure_reset, makers[depths[0]]),
    }
    for bucket in measured:
        for depth in depths:
            tasks[depth, bucket] = functools.partial(_measure_forward, makers[depth], bucket, say)
    sizes = _side_by_side(tasks)
    sample, reset = sizes["sample"], sizes["reset"]
    forward = {
        bucket: at_depth({depth: sizes[depth, bucket] for depth in depths}, model.num_layers)
        for bucket in measured
    }
    return MeasuredStep(
        decode=forward[measured[0]],
        largest=forward[measured[-1]],
        sample=sample,
        rows=rows,
        depths=depths,
        num_programs=len(tasks),
        num_served=len(buckets) + len({bucket.sampled for bucket in buckets}) + 1,
        overhead=step_overhead(
            buckets,
            {bucket: _memory(size) for bucket, size in forward.items()},
            _memory(sample),
            [_memory(reset)],
        ),
        pool_bytes=_pool_bytes(makers[depths[-1]]) * model.num_layers // depths[-1],
        seconds=time.monotonic() - start,
    )


def _side_by_side(tasks: Mapping[Key, Task]) -> dict[Key, ProgramSize]:
    """All results, or the first error at once: what still compiles is left to the process's end."""
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=_THREADS)
    try:
        jobs = {key: executor.submit(task) for key, task in tasks.items()}
        done, _ = concurrent.futures.wait(
            jobs.values(), return_when=concurrent.futures.FIRST_EXCEPTION
        )
        for job in done:
            job.result()
        return {key: job.result() for key, job in jobs.items()}
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def shallow(model: ModelConfig, depth: int) -> ModelConfig:
    """The model's first layers alone."""
    return dataclasses.replace(model, num_layers=depth, layers=model.layers[:depth])


def _measure_forward(
    maker: ProgramMaker, bucket: Bucket, say: Callable[[str], None]
) -> ProgramSize:
    start = time.monotonic()
    program = compile_forward(maker, bucket)
    layers = maker.device.config.num_layers
    say(f"a step of {bucket.tokens} tokens, {layers} layers: {time.monotonic() - start:.1f} s")
    return _size(program, maker.device.mesh)


def _measure_sample(maker: ProgramMaker, rows: int, say: Callable[[str], None]) -> ProgramSize:
    start = time.monotonic()
    program = compile_sample(maker, rows)
    say(f"sampling of {rows} rows: {time.monotonic() - start:.1f} s")
    return _size(program, maker.device.mesh)


def _measure_reset(maker: ProgramMaker) -> ProgramSize:
    return _size(compile_reset(maker), maker.device.mesh)


def _size(program: jax.stages.Compiled, mesh: Mesh) -> ProgramSize:
    memory = program.memory_analysis()
    assert memory is not None, program
    return ProgramSize(
        arguments=int(memory.argument_size_in_bytes),
        outputs=int(memory.output_size_in_bytes),
        aliased=int(memory.alias_size_in_bytes),
        temporaries=int(memory.temp_size_in_bytes),
        code=int(memory.generated_code_size_in_bytes),
        collectives=read_collectives(program.as_text() or "", tensor_parallel_size(mesh)),
    )


def _memory(size: ProgramSize) -> ProgramMemory:
    return ProgramMemory(
        outputs=size.outputs,
        aliased=size.aliased,
        temporaries=size.temporaries,
        code=size.code,
    )


def _pool_bytes(maker: ProgramMaker) -> int:
    pages, _ = abstract_device_state(maker.config, maker.device, maker.num_pages)
    return sum(shard_bytes(leaf) for leaf in jax.tree.leaves(pages))


def shard_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of an array or of its stand-in."""
    assert array.sharding is not None, array
    shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * np.dtype(array.dtype).itemsize
