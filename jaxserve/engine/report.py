"""What an engine resolved to; the log prints it, `jaxserve doctor` shows it."""

from __future__ import annotations

import dataclasses
import logging

from jax.sharding import Mesh

from jaxserve.config import ModelConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.compilation import CompilationLog
from jaxserve.engine.memory import MemoryPlan
from jaxserve.engine.scorer import Scorer

logger = logging.getLogger("jaxserve.engine")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """All choices of one engine.

    num_programs: the engine's own; num_loaded: those of them that came from disk.
    seconds: how long load, kernels, plan and compile took. scorer: None unless the engine was asked
    to read prompts for embeddings or log-probabilities.
    """

    model: ModelConfig
    model_name: str
    dtype: str
    weights: str
    page_dtype: str
    mesh: Mesh
    max_model_len: int
    memory: MemoryPlan
    buckets: tuple[Bucket, ...]
    kernels: dict[str, str]
    compilation: CompilationLog
    num_programs: int
    num_loaded: int
    seconds: dict[str, float]
    page_size: int
    scorer: Scorer | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return (self.memory.num_pages - 1) * self.page_size


def log_report(report: EngineReport) -> None:
    """The model, the pool, what else takes an accelerator's memory, the programs."""
    memory = report.memory
    logger.info(
        "model %s: %s, %d layers, weights (%s) %.0f MB per device (loaded in %.1f s)",
        report.model_name,
        report.dtype,
        report.model.num_layers,
        report.weights,
        memory.weights / 1e6,
        report.seconds["load"],
    )
    logger.info(
        "KV pool: %s, %d pages, %.0f MB, %d tokens (limit: %s); longest sequence %d tokens",
        report.page_dtype,
        memory.num_pages,
        memory.pool / 1e6,
        report.num_tokens,
        memory.limited_by,
        report.max_model_len,
    )
    if memory.overhead.total:
        logger.info(
            "beside weights and pages: programs %.0f MB, temporaries %.0f MB, sampling state %.0f MB",
            memory.overhead.programs / 1e6,
            memory.overhead.temporaries / 1e6,
            memory.overhead.state / 1e6,
        )
    logger.info(
        "%d programs in %.1f s, %d of them loaded from disk; kernels: %s",
        report.num_programs,
        report.seconds["compile"],
        report.num_loaded,
        "; ".join(report.kernels.values()),
    )
