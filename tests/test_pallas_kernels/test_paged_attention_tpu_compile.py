"""Paged attention compiles for TPUs, updates the pool in place and takes little memory.

Compiling is not proof that it is right (the interpreted tests are for that), nor that it is fast.
It shows that blocks, copies and layouts are such as the chips can do, and what they cost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import compile_targets
import jax
import jax.numpy as jnp
import pytest
from compile_targets import CHIPS, MEBIBYTE
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from pallas_kernels.paged_attention import api, cases, tpu
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.reference import QUANTISED, PagedBatch

pytestmark = pytest.mark.compile

#: Of one leaf, about: several times a chip's VMEM, in which XLA hides copies of small arrays.
LEAF_BYTES = 512 * MEBIBYTE
MIXED = {"q_lens": (1, 1, 200, 1, 53), "kv_lens": (900, 31, 200, 1, 800)}


def _mixed(name: str, heads: tuple[int, int, int], **other: Any) -> Case:
    num_heads, num_kv_heads, head_size = heads
    return Case(
        name=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        **(MIXED | other),
    )


#: Every head size, page sizes from end to end, every option, and odd numbers of heads.
CORNERS = (
    _mixed("gpt2", (12, 12, 64), page_size=256),
    _mixed("falcon-7b", (71, 1, 64), page_size=32),
    _mixed("phi-2", (32, 32, 80), page_size=16),
    _mixed("phi-3-mini", (32, 32, 96), page_size=64, window=2047),
    _mixed("gpt-oss-20b", (64, 8, 64), page_size=128, window=128, sinks=True),
    _mixed("llama-3.1-8b-on-8-chips", (4, 1, 128), page_size=16),
    _mixed("gemma-2-9b", (16, 8, 256), page_size=48, soft_cap=50.0, window=4096),
    _mixed("everything", (6, 3, 80), page_size=112, soft_cap=9.0, window=30, sinks=True),
    _mixed("one-row", (8, 2, 128), q_lens=(1,), kv_lens=(7,)),
    _mixed("128-users", cases.LLAMA_8B, q_lens=(1,) * 128, kv_lens=(2048,) * 128),
    _mixed("prefill-2048", (32, 8, 128), q_lens=(2048,), kv_lens=(6000,), page_size=64),
)
#: Pages of 8 bits, from the smallest to the largest.
EIGHT_BITS = (
    *(_mixed(f"llama-3.1-8b-p{size}", cases.LLAMA_8B, page_size=size) for size in (16, 32, 128)),
    *(_mixed(f"smollm2-p{size}", cases.SMOLLM2, page_size=size) for size in (16, 64, 256)),
    _mixed("gemma-3-270m-p64", cases.GEMMA3_270M, page_size=64, window=512),
    _mixed("gemma-3-270m-p256", cases.GEMMA3_270M, page_size=256),
    _mixed("phi-2-p32", (32, 32, 80), page_size=32),
    _mixed("odd-heads", (15, 5, 128), page_size=128, window=30, soft_cap=9.0, sinks=True),
)
CASES = {case.name: case for case in (*cases.FULL, *CORNERS, *EIGHT_BITS)}
#: dtypes of q, k and v, and of the pages.
PLAIN = ("bfloat16", "bfloat16")
OTHER_DTYPES = [("float32", "float32"), ("bfloat16", "float32")]
IN_OTHER_DTYPES = ("gpt2", "phi-2", "gemma-2-9b", "gpt-oss-20b", "llama-3.1-8b-on-8-chips")
#: (case, dtype, page dtype): all in bfloat16 or in 8 bits, some in others too.
CALLS = [
    *((case.name, *PLAIN) for case in (*cases.FULL, *CORNERS)),
    *((name, *dtypes) for name in IN_OTHER_DTYPES for dtypes in OTHER_DTYPES),
    *((case.name, "bfloat16", dtype) for case in EIGHT_BITS for dtype in QUANTISED),
    ("gpt-oss-20b", "float32", "int8"),
    ("llama-3.1-8b-p32", "float32", "float8_e4m3fn"),
]
#: Those that return log-sums too.
LSE_CALLS = [
    ("llama-3.1-8b-decode-8x1024", *PLAIN),
    ("gpt-oss-20b", *PLAIN),
    ("gemma-3-270m-p64", "bfloat16", "int8"),
]
EVERY_CALL = [(chip, *call, False) for call in CALLS for chip in CHIPS] + [
    (chip, *call, True) for call in LSE_CALLS for chip in CHIPS
]
#: What continuous integration compiles (chip, case, dtype, page dtype, log-sums): every head size
#: but one, every dtype of pages, every option, decodes and prefill, on every chip some.
IN_CI = {
    ("v5e", "128-users", *PLAIN, False),
    ("v5e", "smollm2-prefill-512@4000", *PLAIN, False),
    ("v5e", "llama-3.1-8b-p32", "bfloat16", "int8", False),
    ("v5e", "smollm2-p16", "bfloat16", "float8_e4m3fn", False),
    ("v6e", "everything", *PLAIN, False),
    ("v6e", "odd-heads", "bfloat16", "int8", False),
    ("v6e", "gemma-3-270m-p256", "bfloat16", "float8_e4m3fn", False),
    ("v6e", "gpt-oss-20b", *PLAIN, True),
    ("7x", "llama-3.1-8b-on-8-chips", "float32", "float32", False),
    ("7x", "smollm2-p64", "bfloat16", "int8", False),
    ("7x", "gemma-3-270m-p64", "bfloat16", "int8", True),
    ("7x", "llama-3.1-8b-p128", "bfloat16", "float8_e4m3fn", False),
}


@pytest.fixture(autouse=True, scope="module")
def _libtpu() -> Iterator[None]:
    with compile_targets.libtpu_loaded():
        yield


def stand_ins(mesh: Mesh, case: Case, dtype: str, page_dtype: str) -> tuple[Any, ...]:
    """Arguments of a case: q, k, v, pages, batch, sinks."""
    here = functools.partial(compile_targets.on_every_chip, mesh)
    rows, sequences = sum(case.q_lens), len(case.q_lens)
    width = -(-max(case.kv_lens) // case.page_size)
    leaves = api.pool_leaves(
        num_pages(case),
        case.num_kv_heads,
        case.page_size,
        case.head_size,
        page_dtype,
        implementation="tpu",
    )
    batch = PagedBatch(
        here((sequences, width), jnp.int32),
        here((sequences + 1,), jnp.int32),
        here((sequences,), jnp.int32),
    )
    return (
        here((rows, case.num_heads, case.head_size), dtype),
        here((rows, case.num_kv_heads, case.head_size), dtype),
        here((rows, case.num_kv_heads, case.head_size), dtype),
        jax.tree.map(lambda leaf: here(leaf.shape, leaf.dtype), leaves),
        batch,
        here((case.num_heads,), jnp.float32) if case.sinks else None,
    )


def compile_case(
    mesh: Mesh, case: Case, dtype: str, page_dtype: str, *, with_lse: bool = False
) -> jax.stages.Compiled:
    function = tpu.paged_attention_with_lse if with_lse else tpu.paged_attention

    def call(*arguments: Any) -> Any:
        *others, sinks = arguments
        return function(*others, scale=0.1, window=case.window, soft_cap=case.soft_cap, sinks=sinks)

    arguments = stand_ins(mesh, case, dtype, page_dtype)
    return compile_targets.compile_for(mesh, jax.jit(call, donate_argnums=3), *arguments)


def num_pages(case: Case) -> int:
    """So many that a leaf in bfloat16 takes LEAF_BYTES, about."""
    return LEAF_BYTES // (2 * case.num_kv_heads * case.page_size * case.head_size)


def pool_bytes(case: Case, page_dtype: str) -> int:
    """Of all leaves; for head sizes that fill lanes, not a byte more than the numbers take."""
    stored = {80: 128, 96: 128}.get(case.head_size, case.head_size)
    a_token = stored * jnp.dtype(page_dtype).itemsize
    if page_dtype in QUANTISED:
        a_token += {16: 32, 32: 16, 64: 8, 128: 4, 256: 4}[case.page_size]
    return 2 * num_pages(case) * case.page_size * case.num_kv_heads * a_token


def staging_bytes(case: Case, *, with_lse: bool) -> int:
    """Queries and results in float32, head by head, lanes filled; tiles may overhang the end."""
    lanes = (256 if case.head_size == 256 else 128) + (128 if with_lse else 0)
    rows = (sum(case.q_lens) + 128) * case.num_heads + 2 * sum(case.q_lens) * case.num_kv_heads
    return 2 * rows * lanes * 4


@pytest.mark.parametrize(
    ("chip", "name", "dtype", "page_dtype", "with_lse"),
    [
        pytest.param(*call, marks=pytest.mark.compile_ci if call in IN_CI else [])
        for call in EVERY_CALL
    ],
)
def test_compiles_in_place(
    chip: str, name: str, dtype: str, page_dtype: str, with_lse: bool
) -> None:
    case = CASES[name]
    mesh = compile_targets.one_chip(CHIPS[chip])
    program = compile_case(mesh, case, dtype, page_dtype, with_lse=with_lse)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes(case, page_dtype)
    limit = staging_bytes(case, with_lse=with_lse) + 2 * MEBIBYTE
    assert memory.temp_size_in_bytes <= limit


def test_continuous_integration_compiles_what_is_there() -> None:
    assert set(EVERY_CALL) >= IN_CI


def test_the_largest_tables_fit_scalar_memory() -> None:
    """What `paged_attention` does not refuse, the compiler takes: 48 times 5,000 pages."""
    mesh = compile_targets.one_chip(CHIPS["v5e"])
    case = Case(
        name="long",
        num_heads=4,
        num_kv_heads=1,
        head_size=128,
        q_lens=(1,) * 48,
        kv_lens=(80_000,) * 48,
    )
    memory = compile_case(mesh, case, "bfloat16", "bfloat16").memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes(case, "bfloat16")


@pytest.mark.compile_ci
def test_a_copy_of_the_pool_would_be_seen() -> None:
    """The general layout with 64 lanes is copied by XLA, and the numbers above would tell."""
    mesh = compile_targets.one_chip(CHIPS["v5e"])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def kernel(_: Any, pages: Any, scratch: Any, done: Any) -> None:
        copy = pltpu.make_async_copy(scratch, pages.at[0], done)
        copy.start()
        copy.wait()

    def call(pages: jax.Array) -> Any:
        return pl.pallas_call(
            kernel,
            in_specs=[anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM(pages.shape[1:], pages.dtype),
                pltpu.SemaphoreType.DMA,
            ],
            out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            input_output_aliases={0: 0},
        )(pages)

    shape = (LEAF_BYTES // (2 * 16 * 64), 1, 16, 64)
    pages = compile_targets.on_every_chip(mesh, shape, jnp.bfloat16)
    jitted = jax.jit(call, donate_argnums=0)
    memory = compile_targets.compile_for(mesh, jitted, pages).memory_analysis()
    assert memory.temp_size_in_bytes >= LEAF_BYTES
