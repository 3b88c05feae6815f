"""Named calls of paged attention with shapes from real models, for tests and benchmarks alike.

A case is sizes and lengths; `make_inputs` fills them with random numbers: pages in random order,
NaN wherever the call must not look. `small` is a case's twin for tests: the same kind of lengths
and options, fewer heads and tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch, quantise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: sequence b brings q_lens[b] of its kv_lens[b] tokens.

    padding_rows and unused_sequences are what rounding up to a bucket adds.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int = 16
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    padding_rows: int = 0
    unused_sequences: int = 0

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that the call reads; times the size of one gives bytes."""
        read = sum(
            kv if self.window is None else min(kv, self.window + q - 1)
            for q, kv in zip(self.q_lens, self.kv_lens, strict=True)
        )
        return 2 * read * self.num_kv_heads * self.head_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call, and the ids of the pages that its sequences own."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pages: KVPages
    batch: PagedBatch
    options: dict[str, Any]
    owned: np.ndarray


def _decode(name: str, batch: int, context: int, heads: int, kv_heads: int, size: int) -> Case:
    return Case(
        name=name,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        q_lens=(1,) * batch,
        kv_lens=(context,) * batch,
    )


SMOLLM2 = (9, 3, 64)
LLAMA_8B = (32, 8, 128)
GEMMA3_270M = (4, 1, 256)
QWEN25_7B = (28, 4, 128)
GPT2 = (12, 12, 64)

#: Full sizes, for benchmarks.
FULL: tuple[Case, ...] = (
    *(_decode(f"smollm2-decode-{b}x640", b, 640, *SMOLLM2) for b in (1, 8, 32, 64)),
    _decode("smollm2-decode-1x4000", 1, 4000, *SMOLLM2),
    Case(
        name="smollm2-prefill-512@4000",
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        q_lens=(512,),
        kv_lens=(4000,),
    ),
    _decode("llama-3.1-8b-decode-8x1024", 8, 1024, *LLAMA_8B),
    _decode("gemma-3-270m-decode-32x640", 32, 640, *GEMMA3_270M),
    _decode("qwen2.5-7b-decode-8x1024", 8, 1024, *QWEN25_7B),
)


def _small(name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **other: Any) -> Case:
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16} | other
    return Case(name=name, q_lens=q_lens, kv_lens=kv_lens, **sizes)


#: Scaled-down twins and the odd ends, for tests.
SMALL: tuple[Case, ...] = (
    _small("decode", (1, 1, 1), (640, 37, 1), num_heads=9, num_kv_heads=3, head_size=64),
    _small("decode-several-splits", (1,), (1300,), head_size=8),
    _small("prefill", (70,), (70,)),
    _small("prefill-of-many-tiles", (130,), (700,), head_size=8),
    _small("mixed", (1, 40, 1, 5), (33, 90, 600, 17), padding_rows=17, unused_sequences=3),
    _small("ragged", (3, 1, 7, 2), (3, 19, 7, 130), padding_rows=3),
    _small("one-token", (1,), (1,), padding_rows=7, unused_sequences=7),
    _small("nothing", (), (), padding_rows=8, unused_sequences=4),
    _small("multi-head", (1, 5), (40, 21), num_heads=4, num_kv_heads=4, head_size=80),
    _small("multi-query", (1, 5), (40, 21), num_heads=8, num_kv_heads=1, head_size=96),
    _small("wide-group", (2, 1), (70, 20), num_heads=32, num_kv_heads=1, head_size=8),
    _small("odd-group", (5, 1), (70, 20), num_heads=7, num_kv_heads=1, head_size=24),
    _small("head-size-10", (9, 1), (40, 21), head_size=10, page_size=4),
    _small("head-size-3", (9, 1), (40, 21), head_size=3, page_size=2),
    _small("head-size-128", (4, 1), (100, 64), head_size=128, page_size=32),
    _small("head-size-256", (4, 1), (300, 5), head_size=256, page_size=256),
    _small("page-size-1", (4, 1), (9, 5), page_size=1),
    _small("window", (1, 30, 1), (600, 100, 12), window=33),
    _small("window-1", (1, 4), (9, 20), window=1),
    _small("window-at-page-border", (1, 40), (64, 48), window=16),
    _small("soft-cap", (1, 30), (200, 40), soft_cap=5.0),
    _small("small-soft-cap-and-scale", (1, 30), (200, 40), soft_cap=0.5, scale=2.0),
    _small("sinks", (1, 30), (600, 40), sinks=True, num_heads=8),
    _small("window-and-sinks", (1, 30, 9), (600, 40, 600), sinks=True, window=20, num_heads=8),
    _small("everything", (1, 30, 9), (600, 40, 99), sinks=True, window=50, soft_cap=20.0),
    _small("gemma", (1, 30), (99, 40), num_heads=4, num_kv_heads=1, head_size=256, window=64),
)


def make_inputs(
    case: Case,
    *,
    dtype: DTypeLike = jnp.float32,
    page_dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    spare_pages: int = 5,
    poison: bool = True,
) -> Inputs:
    """Random arguments for a case; equal seeds give equal values, one sequence after the other.

    poison: free pages, the trash page, and places past the end of a sequence hold NaN (else 0);
    where the dtype has no NaN, their scales do.
    """
    assert len(case.q_lens) == len(case.kv_lens), case
    rng = np.random.default_rng(seed)
    needed = [-(-kv // case.page_size) for kv in case.kv_lens]
    width = max([1, *needed]) + 1
    num_pages = 1 + sum(needed) + spare_pages
    order = rng.permutation(np.arange(1, num_pages))
    num_sequences = len(needed) + case.unused_sequences
    tables = np.zeros((num_sequences, width), np.int32)
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_size)
    filler = np.nan if poison else 0.0
    stored = [np.full(shape, filler, np.float32) for _ in range(2)]
    start = 0
    for b, count in enumerate(needed):
        tables[b, :count] = order[start : start + count]
        start += count
        past = case.kv_lens[b] - case.q_lens[b]
        for leaf in stored:
            numbers = rng.standard_normal((past, *shape[1::2]), np.float32)
            position = np.arange(past)
            leaf[tables[b, position // case.page_size], :, position % case.page_size] = numbers
    rows = sum(case.q_lens) + case.padding_rows
    q, k, v = (
        jnp.asarray(rng.standard_normal((rows, heads, case.head_size), np.float32), dtype)
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    )
    ends = np.cumsum([0, *case.q_lens, *[0] * case.unused_sequences])
    lengths = np.array([*case.kv_lens, *[0] * case.unused_sequences])
    sinks = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.sinks else None
    return Inputs(
        q=q,
        k=k,
        v=v,
        pages=_store(stored, page_dtype),
        batch=PagedBatch(
            jnp.asarray(tables), jnp.asarray(ends, jnp.int32), jnp.asarray(lengths, jnp.int32)
        ),
        options={
            "scale": case.scale or case.head_size**-0.5,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "sinks": sinks,
        },
        owned=order[:start],
    )


def _store(leaves: list[np.ndarray], dtype: DTypeLike) -> KVPages:
    """Pages [P, K, page_size, H] float32 as a pool of `dtype`."""
    if jnp.dtype(dtype).name not in QUANTISED:
        return KVPages(*(jnp.asarray(leaf, dtype) for leaf in leaves))
    (k, k_scale), (v, v_scale) = (quantise(jnp.asarray(leaf), dtype) for leaf in leaves)
    return KVPages(k, v, k_scale, v_scale)
