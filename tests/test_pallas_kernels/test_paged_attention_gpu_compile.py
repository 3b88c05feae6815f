"""Paged attention compiles for NVIDIA GPUs, updates the pool in place and takes little memory.

Compiling is not proof that it is right (the interpreted tests are for that), nor that it is fast.
It shows that the compiler takes the kernels, that their shared memory fits the chip, and what the
whole call costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from compile_gpu import Answer, Compiler, pool_bytes

from pallas_kernels.paged_attention import cases
from pallas_kernels.paged_attention.cases import Case

pytestmark = [pytest.mark.compile, pytest.mark.timeout(120)]

MEBIBYTE, GIBIBYTE = 2**20, 2**30
LEAF_BYTES = 512 * MEBIBYTE
MIXED = {"q_lens": (1, 3, 200, 1, 53), "kv_lens": (900, 31, 200, 1, 800)}


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
    _mixed("llama-3.1-70b-on-8-gpus", (8, 1, 128), page_size=16),
    _mixed("gemma-2-9b", (16, 8, 256), page_size=48, soft_cap=50.0, window=4096),
    _mixed("everything", (6, 3, 80), page_size=112, soft_cap=9.0, window=30, sinks=True),
    _mixed("one-row", (8, 2, 128), q_lens=(1,), kv_lens=(7,)),
    _mixed("small-odd-heads", (6, 2, 20), page_size=1),
    _mixed("prefill-2048", (32, 8, 128), q_lens=(2048,), kv_lens=(6000,), page_size=64),
)
CASES = {case.name: case for case in (*cases.FULL, *CORNERS)}
#: dtypes of q, k and v, and of the pages.
DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
]
#: (chip, case, dtype, page dtype): for 9.0 every full size with every page dtype, odd ends in
#: bfloat16, and some in others; for 10.0 some of each.
CALLS = [
    *(("h100", case.name, *dtypes) for case in cases.FULL for dtypes in DTYPES),
    *(("h100", case.name, *DTYPES[0]) for case in CORNERS),
    ("h100", "everything", "float32", "bfloat16"),
    ("h100", "everything", "bfloat16", "float32"),
    *(("h100", name, *DTYPES[1]) for name in ("gemma-2-9b", "phi-2", "falcon-7b")),
    *(("h100", name, *DTYPES[2]) for name in ("gpt-oss-20b", "phi-3-mini", "gemma-2-9b")),
    *(("h100", name, *DTYPES[3]) for name in ("gpt-oss-20b", "phi-3-mini", "gemma-2-9b")),
    *(("b200", "llama-3.1-8b-decode-8x1024", *dtypes) for dtypes in DTYPES),
    *(("b200", name, *DTYPES[0]) for name in ("gpt-oss-20b", "gemma-2-9b", "prefill-2048")),
    *(("b200", name, *DTYPES[3]) for name in ("phi-2", "everything")),
]


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, Compiler]]:
    """Child processes, one per kind of GPU, that tests start when they need them."""
    started: dict[str, Compiler] = {}
    yield started
    for compiler in started.values():
        compiler.close()


def compile_case(
    compilers: dict[str, Compiler],
    case: Case,
    *,
    chip: str = "h100",
    dtype: str = "bfloat16",
    page_dtype: str = "bfloat16",
    leaf_bytes: int = LEAF_BYTES,
    **settings: Any,
) -> Answer:
    if chip not in compilers:
        compilers[chip] = Compiler(chip)
    return compilers[chip].attention(
        case, dtype=dtype, page_dtype=page_dtype, leaf_bytes=leaf_bytes, **settings
    )


def staging_bytes(case: Case) -> int:
    """Partial results of sequences with few tokens, 132 programs' worth each, and results."""
    few = min(16, max(1, 64 * case.num_kv_heads // case.num_heads))
    rows = min(sum(case.q_lens), few * len(case.q_lens))
    splits = -(-max(case.kv_lens) // 128)
    parts = rows * case.num_heads * splits * (case.head_size + 1) * 4
    results = sum(case.q_lens) * case.num_heads * (case.head_size + 1) * 4
    return parts + 2 * results


@pytest.mark.parametrize(("chip", "name", "dtype", "page_dtype"), CALLS)
def test_compiles_in_place(
    compilers: dict[str, Compiler], chip: str, name: str, dtype: str, page_dtype: str
) -> None:
    case = CASES[name]
    answer = compile_case(compilers, case, chip=chip, dtype=dtype, page_dtype=page_dtype)
    assert answer.error == ""
    assert answer.alias == pool_bytes(case, page_dtype, LEAF_BYTES)
    assert answer.temporary <= staging_bytes(case) + MEBIBYTE


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8"])
def test_a_pool_of_more_than_four_gibibytes(
    compilers: dict[str, Compiler], page_dtype: str
) -> None:
    """Offsets are 64 bits wide then."""
    case = CASES["llama-3.1-8b-decode-8x1024"]
    answer = compile_case(compilers, case, page_dtype=page_dtype, leaf_bytes=6 * GIBIBYTE)
    assert answer.error == ""
    assert answer.alias == pool_bytes(case, page_dtype, 6 * GIBIBYTE)


def test_a_copy_of_the_pool_would_be_seen(compilers: dict[str, Compiler]) -> None:
    answer = compile_case(compilers, CASES["one-row"], donate=False)
    assert (answer.error, answer.alias) == ("", 0)


def test_too_much_shared_memory_would_be_seen(compilers: dict[str, Compiler]) -> None:
    """The compiler compares what a kernel needs with what the chip has."""
    answer = compile_case(compilers, CASES["gemma-2-9b"], block_tokens=256)
    assert "Shared memory size limit exceeded" in answer.error
