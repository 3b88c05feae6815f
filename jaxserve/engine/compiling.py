"""Compiles every program of an engine before it says ready (before step 1)."""

from __future__ import annotations

import concurrent.futures
import logging
import time

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device_state import LoadedModel, abstract_device_state
from jaxserve.engine.programs import StepShape, abstract, compile_step, make_step, to_abstract
from jaxserve.engine.runner import Programs
from jaxserve.layers.attention import PagedAttentionOp
from jaxserve.parallel.mesh import sharding
from jaxserve.request import SamplingParams
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.state import reset_slot, slot_reset

logger = logging.getLogger("jaxserve.engine")


def temporary_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes) + int(analysis.generated_code_size_in_bytes)


def compile_bucket(
    device: LoadedModel,
    op: PagedAttentionOp,
    bucket: Bucket,
    pages_per_sequence: int,
    config: EngineConfig,
    num_pages: int,
) -> jax.stages.Compiled:
    start = time.monotonic()
    shape = StepShape(bucket=bucket, pages_per_sequence=pages_per_sequence)
    step = make_step(device.config, device.graphdef, device.treedef, device.mesh, op, shape)
    pages, sampling = abstract_device_state(config, device, num_pages)
    compiled = compile_step(step, device.mesh, shape, device.weights, pages, sampling)
    logger.info(
        "compiled the step of %d tokens, %d rows: %.1f s, temporaries %.1f MB",
        bucket.tokens,
        bucket.rows,
        time.monotonic() - start,
        temporary_bytes(compiled) / 1e6,
    )
    return compiled


def compile_programs(
    config: EngineConfig,
    device: LoadedModel,
    op: PagedAttentionOp,
    buckets: tuple[Bucket, ...],
    pages_per_sequence: int,
    num_pages: int,
) -> Programs:
    """All programs, several at a time: tracing is Python, but the compiler runs beside it."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as executor:
        jobs = [
            executor.submit(
                compile_bucket, device, op, bucket, pages_per_sequence, config, num_pages
            )
            for bucket in reversed(buckets)
        ]
        reset = _compile_reset(config, device)
        compiled = [job.result() for job in reversed(jobs)]
    return Programs(steps=dict(zip(buckets, compiled, strict=True)), reset_slot=reset)


def _compile_reset(config: EngineConfig, device: LoadedModel) -> jax.stages.Compiled:
    _, sampling = abstract_device_state(config, device, 2)
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
    reset = jax.tree.map(lambda item: abstract(item.shape, item.dtype, replicated), example)
    jitted = jax.jit(reset_slot, donate_argnums=(0,), out_shardings=replicated)
    return jitted.lower(jax.tree.map(to_abstract, sampling), reset).compile()
