"""Makes every program of an engine before it says ready: from disk, or compiled (before step 1)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device_state import LoadedModel, abstract_device_state
from jaxserve.engine.program_store import ProgramStore
from jaxserve.engine.programs import StepShape, abstract, compile_step, make_step, step_arguments
from jaxserve.engine.runner import Programs
from jaxserve.layers.attention import PagedAttentionOp
from jaxserve.parallel.mesh import sharding
from jaxserve.request import SamplingParams
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import SamplingState, reset_slot, slot_reset
from pallas_kernels.paged_attention.api import KVPages

logger = logging.getLogger("jaxserve.engine")

_THREADS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMaker:
    """Makes the programs for one model and one pool size."""

    config: EngineConfig
    device: LoadedModel
    op: PagedAttentionOp
    pages_per_sequence: int
    num_pages: int

    def compile_bucket(self, bucket: Bucket) -> jax.stages.Compiled:
        """The step of one bucket, from shapes alone."""
        device = self.device
        shape = self._shape(bucket)
        step = make_step(
            device.config, device.graphdef, device.treedef, device.mesh, self.op, shape
        )
        return compile_step(step, device.mesh, self._step_arguments(bucket))

    def make_programs(self, buckets: tuple[Bucket, ...], store: ProgramStore) -> Programs:
        """All programs, several at a time: tracing is Python, but the compiler runs beside it."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=_THREADS) as executor:
            jobs = [executor.submit(self._make_step, bucket, store) for bucket in buckets[::-1]]
            reset = self._make_reset(store)
            steps = [job.result() for job in jobs[::-1]]
        return Programs(steps=dict(zip(buckets, steps, strict=True)), reset_slot=reset)

    def _make_step(self, bucket: Bucket, store: ProgramStore) -> jax.stages.Compiled:
        start = time.monotonic()
        loaded_before = store.num_loaded
        program = store.get(
            f"step_{bucket.tokens}_{bucket.rows}",
            self._step_arguments(bucket),
            _step_output,
            lambda: self.compile_bucket(bucket),
        )
        loaded = store.num_loaded > loaded_before
        logger.log(
            logging.DEBUG if loaded else logging.INFO,
            "%s the step of %d tokens, %d rows: %.1f s, temporaries %.1f MB",
            "loaded" if loaded else "compiled",
            bucket.tokens,
            bucket.rows,
            time.monotonic() - start,
            temporary_bytes(program) / 1e6,
        )
        return program

    def _make_reset(self, store: ProgramStore) -> jax.stages.Compiled:
        arguments = self._reset_arguments()
        replicated = sharding(self.device.mesh, ())
        jitted = jax.jit(reset_slot, donate_argnums=(0,), out_shardings=replicated)
        return store.get(
            "reset_slot", arguments, _sampling_structure, lambda: jitted.lower(*arguments).compile()
        )

    def _shape(self, bucket: Bucket) -> StepShape:
        return StepShape(bucket=bucket, pages_per_sequence=self.pages_per_sequence)

    def _step_arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        pages, sampling = abstract_device_state(self.config, self.device, self.num_pages)
        return step_arguments(
            self.device.mesh, self._shape(bucket), self.device.weights, pages, sampling
        )

    def _reset_arguments(self) -> tuple[Any, ...]:
        _, sampling = abstract_device_state(self.config, self.device, self.num_pages)
        replicated = sharding(self.device.mesh, ())
        example = slot_reset(
            0,
            SamplingParams(),
            prompt_ids=(),
            output_ids=(),
            stop_ids=(),
            vocab_size=self.device.config.vocab_size,
            limits=SamplingLimits(),
        )
        reset = jax.tree.map(lambda item: abstract(item.shape, item.dtype, replicated), example)
        return sampling, reset


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a program takes while it runs, its code included."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes) + int(analysis.generated_code_size_in_bytes)


def _sampling_structure() -> Any:
    return SamplingState(*[0] * len(SamplingState._fields))  # type: ignore[arg-type]


def _step_output() -> Any:
    pages = KVPages(*[0] * len(KVPages._fields))  # type: ignore[arg-type]
    result = SampleResult(*[0] * len(SampleResult._fields))  # type: ignore[arg-type]
    return pages, _sampling_structure(), result
