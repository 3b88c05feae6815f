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
from jaxserve.engine.memory import Overhead, ProgramMemory, measured_buckets, step_overhead
from jaxserve.engine.program_store import ProgramStore
from jaxserve.engine.programs import (
    StepShape,
    abstract,
    compile_forward,
    compile_sample,
    forward_arguments,
    make_forward,
    make_sample,
    sample_arguments,
)
from jaxserve.engine.step_device import Programs
from jaxserve.layers.attention import PagedAttentionOp
from jaxserve.parallel.mesh import sharding
from jaxserve.request import SamplingParams
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import (
    MASKS_AT_ONCE,
    SamplingState,
    allow_tokens,
    reset_slot,
    slot_reset,
)

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
        """`forward` of one bucket, from shapes alone."""
        device = self.device
        forward = make_forward(
            device.config,
            device.graphdef,
            device.treedef,
            device.mesh,
            self.op,
            self._shape(bucket),
        )
        return compile_forward(forward, device.mesh, self._forward_arguments(bucket))

    def compile_sample(self, rows: int) -> jax.stages.Compiled:
        """`sample` for so many rows, from shapes alone."""
        arguments = self._sample_arguments(rows)
        return compile_sample(make_sample(rows, self.device.sampling), self.device.mesh, arguments)

    def compile_reset(self) -> jax.stages.Compiled:
        """What renews one slot of the sampling state, from shapes alone."""
        replicated = sharding(self.device.mesh, ())
        jitted = jax.jit(reset_slot, donate_argnums=(0,), out_shardings=replicated)
        return jitted.lower(*self._reset_arguments()).compile()

    def compile_allow(self) -> jax.stages.Compiled:
        """What gives slots their masks of allowed tokens, from shapes alone."""
        replicated = sharding(self.device.mesh, ())
        jitted = jax.jit(allow_tokens, donate_argnums=(0,), out_shardings=replicated)
        return jitted.lower(*self._allow_arguments()).compile()

    def make_programs(self, buckets: tuple[Bucket, ...], store: ProgramStore) -> Programs:
        """All programs, several at a time: tracing is Python, but the compiler runs beside it."""
        rows = sorted({bucket.sampled for bucket in buckets})
        with concurrent.futures.ThreadPoolExecutor(max_workers=_THREADS) as executor:
            forwards = [
                executor.submit(self._make_forward, bucket, store) for bucket in buckets[::-1]
            ]
            samples = [executor.submit(self._make_sample, count, store) for count in rows]
            reset, allow = self._make_reset(store), self._make_allow(store)
            return Programs(
                forward={
                    bucket: job.result()
                    for bucket, job in zip(buckets, forwards[::-1], strict=True)
                },
                sample={count: job.result() for count, job in zip(rows, samples, strict=True)},
                reset_slot=reset,
                allow_tokens=allow,
            )

    def measure(self, buckets: tuple[Bucket, ...], store: ProgramStore) -> Overhead:
        """What an engine takes beside weights and pages, from a few of its programs."""
        return step_overhead(
            buckets,
            {
                bucket: program_memory(self._make_forward(bucket, store))
                for bucket in measured_buckets(buckets)
            },
            program_memory(self._make_sample(buckets[-1].sampled, store)),
            [program_memory(self._make_reset(store))],
        )

    def _make_forward(self, bucket: Bucket, store: ProgramStore) -> jax.stages.Compiled:
        start = time.monotonic()
        loaded_before = store.num_loaded
        arguments = self._forward_arguments(bucket)
        program = store.get(
            f"forward_{bucket.tokens}_{bucket.rows}",
            arguments,
            lambda: (arguments[1], 0),
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
            program_memory(program).temporaries / 1e6,
        )
        return program

    def _make_sample(self, rows: int, store: ProgramStore) -> jax.stages.Compiled:
        return store.get(
            f"sample_{rows}",
            self._sample_arguments(rows),
            _sample_output,
            lambda: self.compile_sample(rows),
        )

    def _make_reset(self, store: ProgramStore) -> jax.stages.Compiled:
        return store.get(
            "reset_slot", self._reset_arguments(), _sampling_structure, self.compile_reset
        )

    def _make_allow(self, store: ProgramStore) -> jax.stages.Compiled:
        return store.get(
            "allow_tokens", self._allow_arguments(), _sampling_structure, self.compile_allow
        )

    def _shape(self, bucket: Bucket) -> StepShape:
        return StepShape(bucket=bucket, pages_per_sequence=self.pages_per_sequence)

    def _forward_arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        pages, sampling = abstract_device_state(self.config, self.device, self.num_pages)
        return forward_arguments(
            self.device.mesh, self._shape(bucket), self.device.weights, pages, sampling.last_token
        )

    def _sample_arguments(self, rows: int) -> tuple[Any, ...]:
        _, sampling = abstract_device_state(self.config, self.device, self.num_pages)
        return sample_arguments(self.device.mesh, rows, self.device.config.vocab_size, sampling)

    def _allow_arguments(self) -> tuple[Any, ...]:
        _, sampling = abstract_device_state(self.config, self.device, self.num_pages)
        replicated = sharding(self.device.mesh, ())
        words = sampling.allowed_bits.shape[1]
        slots = abstract((MASKS_AT_ONCE,), "int32", replicated)
        return sampling, slots, abstract((MASKS_AT_ONCE, words), "uint32", replicated)

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


def program_memory(program: jax.stages.Compiled) -> ProgramMemory:
    """What the compiler says of a program; all 0 where it says nothing."""
    analysis = program.memory_analysis()
    if analysis is None:
        return ProgramMemory(outputs=0, aliased=0, temporaries=0, code=0)
    return ProgramMemory(
        outputs=int(analysis.output_size_in_bytes),
        aliased=int(analysis.alias_size_in_bytes),
        temporaries=int(analysis.temp_size_in_bytes),
        code=int(analysis.generated_code_size_in_bytes),
    )


def _sampling_structure() -> Any:
    return SamplingState(*[0] * len(SamplingState._fields))  # type: ignore[arg-type]


def _sample_output() -> Any:
    result = SampleResult(*[0] * len(SampleResult._fields))  # type: ignore[arg-type]
    return _sampling_structure(), result
