"""Puts an engine together: model, mesh, pages, programs (everything before step 1).

The one place where choices are made: dtype, kernels, page count, buckets. What was chosen, and
how long each part took, goes to the log and into `EngineReport`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints.open import open_checkpoint
from checkpoints.resolve import resolve_model
from jaxserve.config import DEFAULT_MAX_LEN, EngineConfig, ModelConfig, cache_folder
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.compilation import CompilationLog, use_persistent_cache
from jaxserve.engine.engine import AdmissionLimits, Engine
from jaxserve.engine.memory import MemoryPlan, free_bytes, page_bytes, plan_pages
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.programs import StepShape, Weights, compile_step, make_step, to_abstract
from jaxserve.engine.runner import DeviceRunner, Programs, RunnerShape
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import UsageError
from jaxserve.kv.page_pool import PagePool
from jaxserve.layers.attention import PagedAttentionOp
from jaxserve.models.loading import load_model, make_random_model
from jaxserve.models.registry import read_model_config
from jaxserve.parallel.mesh import make_mesh, sharding
from jaxserve.request import SamplingParams
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.state import SamplingState, make_state, reset_slot, slot_reset
from pallas_kernels.paged_attention.reference import KVPages

logger = logging.getLogger("jaxserve.engine")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine resolved to; `jaxserve doctor` and the log print it."""

    model: ModelConfig
    model_name: str
    dtype: str
    mesh: Mesh
    max_model_len: int
    memory: MemoryPlan
    buckets: tuple[Bucket, ...]
    kernels: dict[str, str]
    compilation: CompilationLog
    seconds: dict[str, float]
    page_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return (self.memory.num_pages - 1) * self.page_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """What the parts of a build share."""

    config: ModelConfig
    mesh: Mesh
    dtype: np.dtype
    graphdef: nnx.GraphDef[Any]
    treedef: Any
    weights: Weights


def make_engine(config: EngineConfig, model: pathlib.Path | None = None) -> tuple[Engine, EngineReport]:
    """A ready engine: loaded, compiled, run once.

    model: the files, when they were resolved already. Raises JaxserveError or CheckpointError.
    """
    config.validate()
    use_persistent_cache(cache_folder() / "programs")
    compilation = CompilationLog()
    compilation.start()
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        path = model if model is not None else resolve_model(config.model, cache_folder())
        device = _load(config, path)
    max_len, pages_per_sequence = _context(config, device.config)
    op, kernels = _choose_kernels(config, device)
    buckets = make_buckets(config.max_num_batched_tokens, config.max_num_seqs)
    with _timed(seconds, "plan"):
        memory = _plan_memory(config, device, op, buckets[-1], pages_per_sequence)
    capacity = (memory.num_pages - 1) * config.page_size
    if capacity < max_len:
        logger.warning("the pool holds %d tokens: requests are limited to that", capacity)
        max_len = capacity
        pages_per_sequence = memory.num_pages - 1
    make_device_state = functools.partial(_make_device_state, config, device, memory.num_pages)
    with _timed(seconds, "compile"):
        programs = _compile(config, device, op, buckets, pages_per_sequence, memory.num_pages)
    runner = DeviceRunner(
        device.weights,
        programs,
        RunnerShape(
            vocab_size=device.config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            page_size=config.page_size,
            pages_per_sequence=pages_per_sequence,
            eos_ids=frozenset(device.config.eos_ids),
            limits=SamplingLimits(),
        ),
        make_device_state,
    )
    runner.warm_up()
    report = EngineReport(
        model=device.config,
        model_name=config.served_name or config.model,
        dtype=device.dtype.name,
        mesh=device.mesh,
        max_model_len=max_len,
        memory=memory,
        buckets=buckets,
        kernels=kernels,
        compilation=compilation,
        seconds=seconds,
        page_size=config.page_size,
    )
    engine = _put_together(config, runner, report)
    _log(report)
    compilation.mark_ready()
    return engine, report


def _put_together(config: EngineConfig, runner: DeviceRunner, report: EngineReport) -> Engine:
    scheduler = Scheduler(
        PagePool(report.memory.num_pages, config.page_size),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
    )
    limits = AdmissionLimits(
        max_model_len=report.max_model_len,
        max_queue_len=config.max_queue_len,
        max_queued_tokens=config.max_queued_tokens,
        eos_ids=frozenset(report.model.eos_ids),
    )
    metrics = EngineMetrics(report.model_name)
    metrics.compiled_after_ready.set_function(lambda: report.compilation.after_ready)
    return Engine(
        runner, scheduler, limits, metrics, asynchronous=config.async_scheduling
    )


def _load(config: EngineConfig, path: pathlib.Path) -> _Device:
    mesh = make_mesh(config.tensor_parallel)
    platform = mesh.devices.flat[0].platform
    name = config.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(name)
    reader = open_checkpoint(path)
    if config.random_weights:
        model_config = read_model_config(reader)
        decoder = make_random_model(model_config, mesh, dtype=dtype, seed=0)
    else:
        model_config, decoder = load_model(reader, mesh, dtype=dtype)
    graphdef, state = nnx.split(decoder)
    weights, treedef = jax.tree.flatten(state)
    return _Device(
        config=model_config,
        mesh=mesh,
        dtype=dtype,
        graphdef=graphdef,
        treedef=treedef,
        weights=tuple(weights),
    )


def _context(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """The longest sequence in tokens, and its pages."""
    longest = config.max_model_len
    if longest is None:
        longest = min(model.max_position, DEFAULT_MAX_LEN)
    elif longest > model.max_position:
        raise UsageError(
            f"--max-model-len is {longest}, but the model was made for {model.max_position} tokens"
        )
    return longest, -(-longest // config.page_size)


def _choose_kernels(
    config: EngineConfig, device: _Device
) -> tuple[PagedAttentionOp, dict[str, str]]:
    from pallas_kernels.paged_attention.reference import paged_attention

    return paged_attention, {"paged_attention": "reference"}


def _plan_memory(
    config: EngineConfig,
    device: _Device,
    op: PagedAttentionOp,
    largest: Bucket,
    pages_per_sequence: int,
) -> MemoryPlan:
    first = device.mesh.devices.flat[0]
    on_cpu = first.platform == "cpu"
    temporaries = 0
    if not on_cpu and config.num_pages is None and config.kv_memory_bytes is None:
        probe = _compile_bucket(device, op, largest, pages_per_sequence, config, num_pages=8)
        temporaries = _temporaries(probe)
    return plan_pages(
        config,
        page=page_bytes(
            device.config, config.page_size, device.dtype.itemsize, config.tensor_parallel
        ),
        weights=sum(array.nbytes for array in device.weights) // config.tensor_parallel,
        temporaries=temporaries,
        pages_per_sequence=pages_per_sequence,
        free=free_bytes(first),
        on_cpu=on_cpu,
    )


def _temporaries(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes) + int(analysis.generated_code_size_in_bytes)


def _make_device_state(
    config: EngineConfig, device: _Device, num_pages: int
) -> tuple[KVPages, SamplingState]:
    """Zeroed pages of all layers, and a fresh sampling state, placed on the mesh."""
    abstract = _abstract_device_state(config, device, num_pages)

    def zeros() -> tuple[KVPages, SamplingState]:
        pages = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract[0])
        return pages, make_state(config.max_num_seqs, device.config.vocab_size, SamplingLimits())

    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    made: tuple[KVPages, SamplingState] = jax.jit(zeros, out_shardings=placed)()
    return made


def _abstract_device_state(config: EngineConfig, device: _Device, num_pages: int) -> Any:
    model, mesh = device.config, device.mesh
    shape = (
        model.num_layers * num_pages,
        model.num_kv_heads,
        config.page_size,
        model.head_size,
    )
    place = sharding(mesh, ("pages", "kv_heads", "page", "head"), shape)
    leaf = jax.ShapeDtypeStruct(shape, device.dtype, sharding=place)
    state = jax.eval_shape(
        functools.partial(
            make_state, config.max_num_seqs, model.vocab_size, SamplingLimits()
        )
    )
    replicated = sharding(mesh, ())
    sampling = jax.tree.map(
        lambda item: jax.ShapeDtypeStruct(item.shape, item.dtype, sharding=replicated), state
    )
    return KVPages(leaf, leaf), sampling


def _compile_bucket(
    device: _Device,
    op: PagedAttentionOp,
    bucket: Bucket,
    pages_per_sequence: int,
    config: EngineConfig,
    num_pages: int,
) -> jax.stages.Compiled:
    start = time.monotonic()
    shape = StepShape(bucket=bucket, pages_per_sequence=pages_per_sequence)
    step = make_step(device.config, device.graphdef, device.treedef, device.mesh, op, shape)
    pages, sampling = _abstract_device_state(config, device, num_pages)
    compiled = compile_step(step, device.mesh, shape, device.weights, pages, sampling)
    logger.info(
        "compiled the step of %d tokens, %d rows: %.1f s, temporaries %.1f MB",
        bucket.tokens,
        bucket.rows,
        time.monotonic() - start,
        _temporaries(compiled) / 1e6,
    )
    return compiled


def _compile(
    config: EngineConfig,
    device: _Device,
    op: PagedAttentionOp,
    buckets: tuple[Bucket, ...],
    pages_per_sequence: int,
    num_pages: int,
) -> Programs:
    """All programs, several at a time: tracing is Python, but the compiler runs beside it."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as executor:
        jobs = [
            executor.submit(
                _compile_bucket, device, op, bucket, pages_per_sequence, config, num_pages
            )
            for bucket in reversed(buckets)
        ]
        reset = _compile_reset(config, device)
        compiled = [job.result() for job in reversed(jobs)]
    return Programs(steps=dict(zip(buckets, compiled, strict=True)), reset_slot=reset)


def _compile_reset(config: EngineConfig, device: _Device) -> jax.stages.Compiled:
    _, sampling = _abstract_device_state(config, device, 2)
    replicated = sharding(device.mesh, ())
    example = slot_reset(
        0,
        SamplingParams(),
        prompt_ids=(),
        output_ids=(),
        stop_ids=(),
        vocab_size=device.config.vocab_size,
        limits=SamplingLimits(),
    )
    reset = jax.tree.map(
        lambda item: jax.ShapeDtypeStruct(item.shape, item.dtype, sharding=replicated), example
    )
    jitted = jax.jit(reset_slot, donate_argnums=(0,), out_shardings=replicated)
    return jitted.lower(jax.tree.map(to_abstract, sampling), reset).compile()


class _timed:  # noqa: N801 - reads as a verb
    """Adds the seconds of a block to a table."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = time.monotonic() - self._start


def _log(report: EngineReport) -> None:
    memory = report.memory
    logger.info(
        "model %s: %s, %d layers, weights %.0f MB per device (loaded in %.1f s)",
        report.model_name,
        report.dtype,
        report.model.num_layers,
        memory.weights / 1e6,
        report.seconds["load"],
    )
    logger.info(
        "KV pool: %d pages, %.0f MB, %d tokens (limit: %s); longest sequence %d tokens",
        memory.num_pages,
        memory.pool / 1e6,
        report.num_tokens,
        memory.limited_by,
        report.max_model_len,
    )
    logger.info(
        "compiled %d programs in %.1f s, %d of them from the cache; kernels: %s",
        report.compilation.total,
        report.seconds["compile"],
        report.compilation.cache_hits,
        ", ".join(f"{op}: {choice}" for op, choice in report.kernels.items()),
    )
