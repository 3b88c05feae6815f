"""How many pages the KV pool gets (before step 1).

    memory = weights + sampling state + code of all programs + temporaries + pages + a margin

Accelerators tell their memory, and what programs take comes from the compiler (`memory_analysis`),
a few of them standing for all (`step_overhead`, which `jaxserve plan` asks, too). A CPU shares its
memory with everybody else: there the pool gets a fixed budget, less if little is free.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
from jax.typing import DTypeLike

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.buckets import Bucket, choose_bucket
from jaxserve.errors import ResourceError
from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention.api import pool_leaves

#: On a CPU: the pool's budget, and the largest share of the free memory that it may take.
CPU_POOL_BYTES = 2 * 2**30
CPU_FREE_SHARE = 0.4
#: On an accelerator: the share of the memory that is left alone (fragmentation, other programs).
ACCELERATOR_MARGIN = 0.05
#: Page counts are rounded down to this, so that a second start finds the same programs in the cache.
_ROUND_PAGES = 128
#: Steps whose logits may be on a device at once: the host never waits for the one before.
STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """What the compiler says of one program on one device, in bytes. aliased: donated arguments."""

    outputs: int
    aliased: int
    temporaries: int
    code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a device holds beside weights and pages, in bytes.

    state: of sampling. programs: code of all of them. temporaries: of the largest step, with the
    logits of STEPS_IN_FLIGHT.
    """

    state: int
    programs: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.state + self.programs + self.temporaries


NO_OVERHEAD = Overhead(state=0, programs=0, temporaries=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory of one device goes, in bytes."""

    weights: int
    overhead: Overhead
    page: int
    num_pages: int
    limited_by: str

    @property
    def pool(self) -> int:
        return self.page * self.num_pages


def measured_buckets(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Those that stand for all: the smallest that gives every sequence a token, and the largest."""
    rows = buckets[-1].rows
    return tuple(dict.fromkeys((choose_bucket(buckets, rows, rows), buckets[-1])))


def step_overhead(
    buckets: tuple[Bucket, ...],
    forward: Mapping[Bucket, ProgramMemory],
    sample: ProgramMemory,
    others: Sequence[ProgramMemory] = (),
) -> Overhead:
    """What an engine with these buckets takes beside weights and pages.

    forward: of some buckets, the largest among them; every other one counts as the next larger.
    sample: for the most rows; there is one for each number of rows. others: every other program.
    """
    largest = forward[buckets[-1]]
    measured = sorted(forward, key=lambda bucket: bucket.tokens)
    forwards = sum(
        next(forward[larger].code for larger in measured if larger.tokens >= bucket.tokens)
        for bucket in buckets
    )
    samples = sample.code * len({bucket.sampled for bucket in buckets})
    programs = (*forward.values(), sample, *others)
    logits = largest.outputs - largest.aliased
    return Overhead(
        state=sample.aliased,
        programs=forwards + samples + sum(program.code for program in others),
        temporaries=max(program.temporaries for program in programs) + STEPS_IN_FLIGHT * logits,
    )


def page_bytes(
    config: ModelConfig,
    page_size: int,
    dtype: DTypeLike,
    tensor_parallel: int,
    attention: Choice | str,
) -> int:
    """Bytes of one page of all layers, keys and values and their scales, on one device.

    dtype: of the pages. attention: the implementation, whose layout may pad a page.
    """
    leaves = pool_leaves(
        1,
        config.num_kv_heads // tensor_parallel,
        page_size,
        config.head_size,
        dtype,
        implementation=attention,
    )
    one: int = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    return config.num_layers * one


def plan_pages(
    config: EngineConfig,
    *,
    page: int,
    weights: int,
    overhead: Overhead,
    pages_per_sequence: int,
    free: int,
    on_cpu: bool,
) -> MemoryPlan:
    """The number of pages, the trash page included.

    free: bytes of one device that are not taken yet, the weights being loaded already.
    Raises ResourceError when not even one sequence of one page fits.
    """
    enough = config.max_num_seqs * pages_per_sequence + 1
    if config.num_pages is not None:
        wanted, reason = config.num_pages, "--num-pages"
    elif config.kv_memory_bytes is not None:
        wanted, reason = config.kv_memory_bytes // page, "--kv-memory-bytes"
    else:
        if on_cpu:
            room, reason = min(CPU_POOL_BYTES, int(free * CPU_FREE_SHARE)), "the CPU's budget"
        else:
            room, reason = int(free * (1 - ACCELERATOR_MARGIN)) - overhead.total, "device memory"
        wanted = room // page
        if wanted > _ROUND_PAGES:
            wanted -= wanted % _ROUND_PAGES
    if wanted > enough and config.num_pages is None:
        wanted, reason = enough, "all slots at full length"
    if wanted < 2:
        besides = f", of which programs need {overhead.total:,}" if overhead.total else ""
        raise ResourceError(
            f"no room for the KV pool: a page takes {page:,} bytes and {free:,} bytes are free"
            f"{besides}; choose a smaller model, --page-size or --max-num-batched-tokens"
        )
    return MemoryPlan(
        weights=weights,
        overhead=overhead,
        page=page,
        num_pages=wanted,
        limited_by=reason,
    )


def free_bytes(device: jax.Device) -> int:
    """Bytes of a device that nothing has taken."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return host_free_bytes()


def host_free_bytes() -> int:
    """Bytes of main memory that programs can still get."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit = container_free_bytes(pathlib.Path("/sys/fs/cgroup"))
    return free if limit is None else min(free, limit)


def container_free_bytes(cgroup: pathlib.Path) -> int | None:
    """What a container (control group, version 2) may still take; None where there is no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = (cgroup / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = sum(
        int(line.split()[1])
        for line in statistics.splitlines()
        if line.startswith("inactive_file ")
    )
    return max(0, int(limit) - used + cached)
