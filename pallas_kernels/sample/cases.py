"""Named calls of sampling with real vocabularies, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: rows of logits, all with the same filters. hidden_size: of the model's last layer,
    whose matmul makes the logits and gives sampling something to be compared with.
    """

    name: str
    rows: int
    vocab_size: int
    hidden_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SMOLLM2 = (49_152, 576)
LLAMA_8B = (128_256, 4096)
GEMMA3_270M = (262_144, 640)


def _case(name: str, rows: int, model: tuple[int, int], **filters: float) -> Case:
    vocab_size, hidden_size = model
    return Case(
        name=name,
        rows=rows,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        temperature=filters.get("temperature", 1.0),
        top_k=int(filters.get("top_k", 0)),
        top_p=filters.get("top_p", 1.0),
        min_p=filters.get("min_p", 0.0),
    )


FULL: tuple[Case, ...] = (
    _case("smollm2-32-greedy", 32, SMOLLM2, temperature=0.0),
    _case("smollm2-32-top-p", 32, SMOLLM2, top_p=0.9),
    _case("llama-3.1-8b-8-greedy", 8, LLAMA_8B, temperature=0.0),
    _case("llama-3.1-8b-64-top-k-top-p", 64, LLAMA_8B, top_k=50, top_p=0.9),
    _case("gemma-3-270m-8-greedy", 8, GEMMA3_270M, temperature=0.0),
    _case("gemma-3-270m-8-plain", 8, GEMMA3_270M),
    _case("gemma-3-270m-8-everything", 8, GEMMA3_270M, top_k=64, top_p=0.95, min_p=0.01),
)


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """Arguments of `sample`: logits [R, V], four filters [R], seeds [R, 2], positions [R]."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((case.rows, case.vocab_size), np.float32) * 3

    def every(value: float, dtype: str) -> jax.Array:
        return jnp.full(case.rows, value, dtype)

    return (
        jnp.asarray(logits),
        every(case.temperature, "float32"),
        every(case.top_k, "int32"),
        every(case.top_p, "float32"),
        every(case.min_p, "float32"),
        jnp.asarray(rng.integers(0, 2**32, (case.rows, 2), dtype=np.uint32)),
        jnp.arange(case.rows, dtype=jnp.int32),
    )
