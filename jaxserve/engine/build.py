"""Puts an engine together: model, mesh, pages, programs (everything before step 1).

The one place where choices are made: dtype, kernels, page count, buckets. What was chosen, and
how long each part took, goes to the log and into `EngineReport`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints.open import open_checkpoint
from checkpoints.resolve import resolve_model
from jaxserve.config import (
    DEFAULT_ITL_TARGET_MS,
    DEFAULT_MAX_LEN,
    KV_CACHE_DTYPES,
    EngineConfig,
    ModelConfig,
    cache_folder,
)
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.chunking import ChunkPolicy
from jaxserve.engine.compilation import CompilationLog
from jaxserve.engine.compiling import ProgramMaker
from jaxserve.engine.device_state import LoadedModel, device_state_maker
from jaxserve.engine.drafting import make_drafting
from jaxserve.engine.engine import AdmissionLimits, Engine
from jaxserve.engine.heap import return_freed_memory
from jaxserve.engine.hosts.lead import Hosts, OneHost
from jaxserve.engine.kernel_loading import begin_loading_kernels, load_kernels
from jaxserve.engine.memory import (
    NO_OVERHEAD,
    MemoryPlan,
    free_bytes,
    page_bytes,
    plan_pages,
)
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.page_memory import PageMemory
from jaxserve.engine.product_choice import choose_float_products
from jaxserve.engine.program_store import ProgramStore
from jaxserve.engine.quantize_choice import choose_quantization, describe
from jaxserve.engine.report import EngineReport, log_report
from jaxserve.engine.runner import DeviceRunner, RunnerShape
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.score_programs import EMBED, LOGPROBS, ScoreDevice
from jaxserve.engine.scorer import Scorer
from jaxserve.engine.step_costs import StepCosts
from jaxserve.engine.step_device import Device, StepDevice
from jaxserve.errors import UsageError
from jaxserve.kv.page_pool import PagePool
from jaxserve.layers.attention import PagedAttentionOp
from jaxserve.models.loading import load_model, make_random_model
from jaxserve.models.registry import read_model_config
from jaxserve.models.weight_store import WeightStore
from jaxserve.parallel.mesh import check_divisible, make_mesh
from jaxserve.quantization.weights import Quantization
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.structured.matcher import Grammars
from jaxserve.structured.vocabulary import load_vocabulary
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.api import paged_attention

logger = logging.getLogger("jaxserve.engine")

#: Of the pool that programs are measured with: what they take beside it does not depend on it.
_PROBE_PAGES = 8


def make_engine(
    config: EngineConfig, model: pathlib.Path | None = None, hosts: Hosts | None = None
) -> tuple[Engine, EngineReport]:
    """A ready engine: loaded, compiled, run once.

    model: the files, when they were resolved already. hosts: what `hosts.lead` gave, None for this
    process alone. Raises JaxserveError or CheckpointError.
    """
    config.validate()
    path = model if model is not None else resolve_model(config.model, cache_folder())
    grammars = _make_grammars(path)
    threading.Thread(target=grammars.prepare, name="vocabulary", daemon=True).start()
    memory = PageMemory()
    device, report = make_device(config, path, hosts, memory)
    runner = DeviceRunner(device, _runner_shape(config, report))
    runner.warm_up()
    return_freed_memory()
    engine = _put_together(config, runner, report, grammars, memory)
    grammars.prepare()  # it keeps the interpreter's lock, and must not do so once there are answers
    log_report(report)
    report.compilation.mark_ready()
    return engine, report


def make_device(
    config: EngineConfig,
    model: pathlib.Path | None = None,
    hosts: Hosts | None = None,
    page_memory: PageMemory | None = None,
) -> tuple[Device, EngineReport]:
    """The device's side of an engine, loaded and compiled: all that a follower needs.

    page_memory: follows the pool. Other arguments and errors as of `make_engine`.
    """
    hosts = hosts or OneHost()
    config.validate()
    if score_kinds(config) and not isinstance(hosts, OneHost):
        raise UsageError("--embeddings and --prompt-logprobs work on one host only; leave them out")
    compilation = CompilationLog()
    compilation.start()
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        path = model if model is not None else resolve_model(config.model, cache_folder())
        device, wait_for_kernels = _load(config, path)
    max_len, pages_per_sequence = choose_context(config, device.config)
    buckets = make_buckets(config.max_num_batched_tokens, config.max_step_rows)
    with _timed(seconds, "kernels"):
        wait_for_kernels()
        device, op, kernels = _load_kernels(config, device)
    with _timed(seconds, "plan"):
        memory = _plan_memory(config, device, op, kernels, buckets, pages_per_sequence)
        num_pages = hosts.agree(path, device, kernels, memory.num_pages)
        if num_pages != memory.num_pages:
            memory = dataclasses.replace(memory, num_pages=num_pages, limited_by="another host")
    capacity = (memory.num_pages - 1) * config.page_size
    if capacity < max_len:
        logger.warning("the pool holds %d tokens: requests are limited to that", capacity)
        max_len = capacity
        pages_per_sequence = memory.num_pages - 1
    with _timed(seconds, "compile"):
        maker = ProgramMaker(
            config=config,
            device=device,
            op=op,
            pages_per_sequence=pages_per_sequence,
            num_pages=memory.num_pages,
        )
        store = _open_store(maker, kernels)
        programs = maker.make_programs(buckets, store)
    make_state = device_state_maker(config, device, memory.num_pages)
    if page_memory is not None:
        make_state = page_memory.following(make_state, device.config.num_layers)
    report = EngineReport(
        model=device.config,
        model_name=config.model_name,
        dtype=device.dtype.name,
        weights=describe(device.quantization, device.dtype),
        page_dtype=device.page_dtype.name,
        mesh=device.mesh,
        max_model_len=max_len,
        memory=memory,
        buckets=buckets,
        kernels=kernels,
        compilation=compilation,
        num_programs=len(programs.forward) + len(programs.sample) + 1,
        num_loaded=store.num_loaded,
        seconds=seconds,
        page_size=config.page_size,
        scorer=_make_scorer(config, device, op, max_len, store) if score_kinds(config) else None,
    )
    return hosts.join_device(StepDevice(device.weights, programs, make_state)), report


def score_kinds(config: EngineConfig) -> tuple[str, ...]:
    """What prompts can be read for."""
    kinds = (EMBED, config.embeddings != "off"), (LOGPROBS, config.prompt_logprobs)
    return tuple(kind for kind, wanted in kinds if wanted)


def _make_scorer(
    config: EngineConfig,
    device: LoadedModel,
    op: PagedAttentionOp,
    max_len: int,
    store: ProgramStore,
) -> Scorer:
    pages = -(-max_len // config.page_size)
    return Scorer(
        ScoreDevice(config, device, op, pages, score_kinds(config), store),
        max_model_len=max_len,
        vocab_size=device.config.vocab_size,
        max_queue_len=config.max_queue_len,
    )


def _runner_shape(config: EngineConfig, report: EngineReport) -> RunnerShape:
    return RunnerShape(
        buckets=report.buckets,
        vocab_size=report.model.vocab_size,
        max_num_seqs=config.max_num_seqs,
        pages_per_sequence=-(-report.max_model_len // config.page_size),
        eos_ids=frozenset(report.model.eos_ids),
        limits=SamplingLimits(),
    )


def _put_together(
    config: EngineConfig,
    runner: DeviceRunner,
    report: EngineReport,
    grammars: Grammars,
    memory: PageMemory,
) -> Engine:
    scheduler = Scheduler(
        PagePool(report.memory.num_pages, config.page_size, on_growth=memory.expect),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
        chunks=ChunkPolicy(
            StepCosts([bucket.tokens for bucket in report.buckets]),
            max_step_tokens=config.max_num_batched_tokens,
            objective=_seconds_between_tokens(config),
        ),
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
        runner,
        scheduler,
        limits,
        metrics,
        asynchronous=config.async_scheduling,
        drafting=make_drafting(config, report.buckets),
        grammars=grammars,
    )


def _make_grammars(path: pathlib.Path) -> Grammars:
    model = read_model_config(open_checkpoint(path))
    return Grammars(
        lambda: load_vocabulary(path, model.vocab_size, model.eos_ids), model.vocab_size
    )


def _seconds_between_tokens(config: EngineConfig) -> float | None:
    target = config.itl_target_ms
    target = DEFAULT_ITL_TARGET_MS if target is None else target
    return target / 1000 or None


def _load(config: EngineConfig, path: pathlib.Path) -> tuple[LoadedModel, Callable[[], None]]:
    """The model, and what waits for its kernels, which are loaded meanwhile."""
    mesh = make_mesh(config.tensor_parallel)
    platform = mesh.devices.flat[0].platform
    dtype = choose_dtype(config, platform)
    reader = open_checkpoint(path)
    model_config = read_model_config(reader)
    check_divisible(model_config, mesh)
    quantization = choose_quantization(
        config, model_config, reader, mesh, dtype, resolve_kernels(config)
    )
    page_dtype = choose_page_dtype(config, dtype, quantization)
    wait_for_kernels = begin_loading_kernels(
        cache_folder() / "kernels",
        attention=choose_attention(config, model_config, dtype, page_dtype, platform),
        page_dtype=page_dtype,
        quantization=quantization,
    )
    if config.random_weights:
        decoder = make_random_model(
            model_config, mesh, dtype=dtype, seed=0, quantization=quantization
        )
    else:
        model_config, decoder = load_model(
            reader,
            mesh,
            dtype=dtype,
            quantization=quantization,
            store=_open_weights(path, mesh, dtype, quantization),
        )
    products = choose_float_products(decoder, mesh, dtype, resolve_kernels(config))
    graphdef, state = nnx.split(decoder)
    weights, treedef = jax.tree.flatten(state)
    model = LoadedModel(
        config=model_config,
        mesh=mesh,
        dtype=dtype,
        page_dtype=page_dtype,
        graphdef=graphdef,
        treedef=treedef,
        weights=tuple(weights),
        quantization=quantization,
        products=products,
    )
    return model, wait_for_kernels


def _open_weights(
    path: pathlib.Path, mesh: Mesh, dtype: np.dtype, quantization: Quantization | None
) -> WeightStore | None:
    """Where quantised weights are kept; None for plain ones, and on several devices."""
    if quantization is None or mesh.size > 1 or jax.process_count() > 1:
        return None
    forms = [
        (form.scheme, form.implementation) for form in (quantization.layers, quantization.embedding)
    ]
    return WeightStore(cache_folder() / "weights", path, [dtype.name, *forms])


def choose_dtype(config: EngineConfig, platform: str) -> np.dtype:
    """Of weights and activations."""
    name = config.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return np.dtype(jnp.dtype(name))


def choose_page_dtype(
    config: EngineConfig, dtype: np.dtype, quantization: Quantization | None
) -> np.dtype:
    """Of the KV pages. auto follows `dtype`, that of activations, except where --quantization auto
    made the weights small: half of what attention reads is left, and less is lost than by them."""
    name = config.kv_cache_dtype
    if name == "auto":
        made_small = config.quantization == "auto" and quantization is not None
        return np.dtype(jnp.bfloat16) if made_small else dtype
    return np.dtype(jnp.dtype(KV_CACHE_DTYPES[name]))


def choose_context(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """The longest sequence in tokens, and its pages. Raises UsageError."""
    longest = config.max_model_len
    if longest is None:
        longest = min(model.max_position, DEFAULT_MAX_LEN)
    elif longest > model.max_position:
        raise UsageError(
            f"--max-model-len is {longest}, but the model was made for {model.max_position} tokens"
        )
    return longest, -(-longest // config.page_size)


def _load_kernels(
    config: EngineConfig, device: LoadedModel
) -> tuple[LoadedModel, PagedAttentionOp, dict[str, str]]:
    """The model with its ops chosen, attention, and what the log says of them."""
    platform = device.mesh.devices.flat[0].platform
    choice = choose_attention(config, device.config, device.dtype, device.page_dtype, platform)
    load_kernels(
        cache_folder() / "kernels",
        attention=choice,
        page_dtype=device.page_dtype,
        quantization=device.quantization,
        products=device.products,
    )
    op = functools.partial(paged_attention, implementation=choice)
    sampling = choose_sampling(config, device.config, platform)
    log = {each.op: str(each) for each in (choice, sampling)}
    if device.products:
        log["float_matmul"] = f"float_matmul: {' and '.join(sorted(device.products))}"
    if device.quantization is not None:
        forms = (device.quantization.layers, device.quantization.embedding)
        names = " and ".join(sorted({form.implementation for form in forms}))
        log["quantized_matmul"] = f"quantized_matmul: {names}"
    return dataclasses.replace(device, attention=choice, sampling=sampling), op, log


def choose_attention(
    config: EngineConfig,
    model: ModelConfig,
    dtype: np.dtype,
    page_dtype: np.dtype,
    platform: str,
) -> dispatch.Choice:
    """The implementation of attention for this model. Raises UsageError if there is none."""
    split = config.tensor_parallel
    try:
        return dispatch.choose(
            "paged_attention",
            platform=platform,
            kernels=resolve_kernels(config),
            dtype=dtype,
            page_dtype=page_dtype,
            num_heads=model.num_heads // split,
            num_kv_heads=model.num_kv_heads // split,
            head_size=model.head_size,
            page_size=config.page_size,
        )
    except KernelError as error:
        raise UsageError(str(error)) from None


def choose_sampling(config: EngineConfig, model: ModelConfig, platform: str) -> dispatch.Choice:
    """The implementation of sampling. Raises UsageError if there is none."""
    try:
        return dispatch.choose(
            "sample",
            platform=platform,
            kernels=resolve_kernels(config),
            vocab_size=model.vocab_size,
        )
    except KernelError as error:
        raise UsageError(str(error)) from None


def resolve_kernels(config: EngineConfig) -> str:
    """--kernels, or the environment's JAXSERVE_KERNELS where the flag says auto."""
    if config.kernels == dispatch.AUTO:
        return dispatch.kernels_from_environment()
    return config.kernels


def _plan_memory(
    config: EngineConfig,
    device: LoadedModel,
    op: PagedAttentionOp,
    kernels: dict[str, str],
    buckets: tuple[Bucket, ...],
    pages_per_sequence: int,
) -> MemoryPlan:
    first = device.mesh.local_devices[0]
    on_cpu = first.platform == "cpu"
    free = free_bytes(first)  # before programs are loaded, whose code is counted by `measure`
    overhead = NO_OVERHEAD
    if not on_cpu and config.num_pages is None and config.kv_memory_bytes is None:
        probe = ProgramMaker(
            config=config,
            device=device,
            op=op,
            pages_per_sequence=pages_per_sequence,
            num_pages=_PROBE_PAGES,
        )
        overhead = probe.measure(buckets, _open_store(probe, kernels))
    return plan_pages(
        config,
        page=page_bytes(
            device.config,
            config.page_size,
            device.page_dtype,
            config.tensor_parallel,
            device.attention,
        ),
        weights=sum(array.nbytes for array in device.weights) // config.tensor_parallel,
        overhead=overhead,
        pages_per_sequence=pages_per_sequence,
        free=free,
        on_cpu=on_cpu,
    )


def _open_store(maker: ProgramMaker, kernels: dict[str, str]) -> ProgramStore:
    device = maker.device
    facts = (
        device.config,
        (device.dtype, device.page_dtype, describe(device.quantization, device.dtype)),
        dict(device.mesh.shape),
        [(array.shape, array.dtype) for array in device.weights],
        (maker.config.max_num_seqs, maker.config.page_size),
        maker.pages_per_sequence,
        maker.num_pages,
        kernels,
        SamplingLimits(),
    )
    return ProgramStore(cache_folder() / "programs", list(device.mesh.devices.flat), facts)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Enters the seconds that the block takes into a table."""
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start
