"""The GPU kernels, interpreted on the CPU, against the definition.

Interpreting is compiling a large XLA program, so there are few. Free pages, the trash page and
places past the end of a sequence hold NaN, and so does memory that a kernel has not written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import cases, gpu, gpu_tile, gpu_work, reference
from pallas_kernels.paged_attention.cases import Case, Inputs
from pallas_kernels.paged_attention.gpu_sizes import Facts, Sizes, choose_sizes
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch

BY_NAME = {case.name: case for case in cases.SMALL}
#: XLA's quickest compilation: these programs run for milliseconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Cases with dtypes of q, k and v, and of the pages.
CALLS = [
    ("mixed", "float32", "float32"),
    ("everything", "bfloat16", "bfloat16"),
    ("decode-several-splits", "bfloat16", "int8"),
    ("odd-group", "bfloat16", "float8_e4m3fn"),
    pytest.param("multi-query", "float32", "int8", marks=pytest.mark.slow),
    pytest.param("gemma", "bfloat16", "float32", marks=pytest.mark.slow),
]

Output = tuple[np.ndarray, KVPages, np.ndarray]


def make_run(**options: Any) -> Callable[[Inputs], Output]:
    """What runs the kernels with these options: compiled once for inputs of the same sizes."""
    call = functools.partial(gpu.paged_attention_with_lse, interpret=True, **options)
    program = jax.jit(call, compiler_options=QUICK)

    def run(inputs: Inputs) -> Output:
        out, pages, lse = program(inputs.q, inputs.k, inputs.v, inputs.pages, inputs.batch)
        assert out.dtype == inputs.q.dtype
        return np.asarray(out, np.float32), pages, np.asarray(lse)

    return run


def run(inputs: Inputs) -> Output:
    """Output as float32, the pages after the call, and the log-sum-exp."""
    return make_run(**inputs.options)(inputs)


def expected(inputs: Inputs) -> Output:
    """What the definition gives in float32, from the numbers that the kernels get."""
    call = functools.partial(reference.paged_attention_with_lse, **inputs.options)
    q, k, v = (x.astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v))
    out, pages, lse = jax.jit(call, compiler_options=QUICK)(q, k, v, inputs.pages, inputs.batch)
    return np.asarray(out), pages, np.asarray(lse)


def assert_right(inputs: Inputs, got: Output, want: Output) -> None:
    """Output and log-sum-exp near the definition's; pages exactly as they must be."""
    out, pages, lse = got
    dtype, page_dtype = inputs.q.dtype, inputs.pages.k.dtype
    # bfloat16 rounds the result, and where it meets such pages, the softmax weights.
    limit = 3e-6
    if dtype == jnp.bfloat16:
        limit = 2.0**-8 * (1.01 if page_dtype == jnp.float32 else 3.0)
    assert not np.isnan(out).any(), "a NaN from where there is nothing to see came through"
    worst = np.max(np.abs(out - want[0]) / np.maximum(1.0, np.abs(want[0])), initial=0.0)
    assert worst <= limit, f"off by {worst:.1e}, allowed are {limit:.1e}"
    np.testing.assert_allclose(lse, want[2], atol=1e-5, rtol=1e-6)
    for leaf, exact in zip(jax.tree.leaves(pages), jax.tree.leaves(want[1]), strict=True):
        # Page 0 is the trash page: what is in it means nothing.
        assert np.asarray(leaf)[1:].tobytes() == np.asarray(exact)[1:].tobytes()


@pytest.mark.parametrize(("name", "dtype", "page_dtype"), CALLS)
def test_equals_the_definition(name: str, dtype: str, page_dtype: str) -> None:
    inputs = cases.make_inputs(BY_NAME[name], dtype=dtype, page_dtype=page_dtype)
    assert_right(inputs, run(inputs), expected(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SMALL, ids=[case.name for case in cases.SMALL])
def test_every_small_case(case: Case) -> None:
    inputs = cases.make_inputs(case)
    assert_right(inputs, run(inputs), expected(inputs))


#: One sequence of every kind: few query tokens over several splits, and more than a tile.
COMPANY = Case(
    name="company",
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    q_lens=(1, 70, 2),
    kv_lens=(300, 90, 600),
    window=400,
    sinks=True,
    padding_rows=3,
    unused_sequences=1,
)


def alone(inputs: Inputs, case: Case, b: int) -> tuple[Inputs, slice]:
    """The same call with sequence b alone, in arrays of its own sizes, and the rows it had."""
    start = sum(case.q_lens[:b])
    rows = slice(start, start + case.q_lens[b])
    batch = PagedBatch(
        inputs.batch.block_tables[b : b + 1],
        jnp.array([0, case.q_lens[b]], jnp.int32),
        inputs.batch.kv_lens[b : b + 1],
    )
    q, k, v = (x[rows] for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v, batch=batch), rows


def test_company_makes_no_difference() -> None:
    """Bit for bit the same alone and in a batch, though the arrays' sizes differ."""
    inputs = cases.make_inputs(COMPANY)
    out, _, lse = run(inputs)
    for b in (1, 2):
        single, rows = alone(inputs, COMPANY, b)
        own_out, _, own_lse = run(single)
        assert own_out.tobytes() == out[rows].tobytes()
        assert own_lse.tobytes() == lse[rows].tobytes()


#: The smallest program: no sequence has many tokens.
PLAIN = Case(
    name="plain",
    num_heads=1,
    num_kv_heads=1,
    head_size=16,
    q_lens=(1, 2, 1),
    kv_lens=(130, 40, 16),
    window=100,
)


def _sees_one_token_more(plan: Any, position: jax.Array, token: jax.Array) -> jax.Array:
    return SEES(plan, position, token - 1)


def _sees_one_token_less(plan: Any, position: jax.Array, token: jax.Array) -> jax.Array:
    return SEES(plan, position, token) & (token != position)


def _reads_the_page_before(*arguments: Any) -> jax.Array:
    """The page that the sequence had a page's length earlier."""
    plan, keys, tile, tokens, needed = arguments
    earlier = jnp.maximum(tokens - plan.page_size, 0)
    return PAGE_OF(plan, keys, tile, earlier, needed)


def _forgets_the_last_split(*arguments: Any) -> Any:
    splits, parts = MAKE_SPLITS(*arguments)
    return splits, parts._replace(end=jnp.where(parts.end > 1, parts.end - 1, parts.end))


SEES, PAGE_OF, MAKE_SPLITS = gpu_tile.sees, gpu_tile.page_of, gpu_work.make_splits


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (gpu_tile, "sees", _sees_one_token_more),
        pytest.param(gpu_tile, "sees", _sees_one_token_less, marks=pytest.mark.slow),
        (gpu_tile, "page_of", _reads_the_page_before),
        (gpu_work, "make_splits", _forgets_the_last_split),
    ],
    ids=["mask", "mask-of-own-token", "stale-page", "last-split"],
)
def test_a_planted_mistake_is_found(
    module: Any, name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = cases.make_inputs(PLAIN)
    want = expected(inputs)
    monkeypatch.setattr(module, name, mistake)
    with pytest.raises(AssertionError):
        assert_right(inputs, run(inputs), want)


def test_the_program_with_no_mistake_is_right() -> None:
    """So that a planted mistake cannot be 'found' because the small program is wrong anyway."""
    inputs = cases.make_inputs(PLAIN)
    run = make_run(**inputs.options)
    got = run(inputs)
    assert_right(inputs, got, expected(inputs))
    # A NaN among a sequence's own keys is not hidden by the softmax or by the joining of parts.
    broken = dataclasses.replace(inputs, k=inputs.k.at[0].set(jnp.nan))
    out, *_ = run(broken)
    assert np.isnan(out[0]).all()
    assert out[1:].tobytes() == got[0][1:].tobytes()
    # Nor does one among a token's values reach an earlier row of the same tile.
    broken = dataclasses.replace(inputs, v=inputs.v.at[2, 0, 3].set(jnp.nan))
    out, *_ = run(broken)
    assert np.isnan(out[2]).all()
    assert np.delete(out, 2, 0).tobytes() == np.delete(got[0], 2, 0).tobytes()


def sizes_of(heads: tuple[int, int, int], page: str = "bfloat16", dtype: str = "bfloat16") -> Sizes:
    num_heads, num_kv_heads, head_size = heads
    return choose_sizes(
        Facts(
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_size=head_size,
            page_dtype=np.dtype(page),
            compute_dtype=np.dtype(dtype),
        )
    )


def test_long_sequences_fill_the_chip() -> None:
    """A sequence of 4,000 tokens is at least 96 programs, for models of few and many KV heads."""
    for heads in (cases.SMOLLM2, cases.LLAMA_8B, cases.QWEN25_7B, (32, 32, 96), (64, 8, 64)):
        sizes = sizes_of(heads)
        programs = heads[1] * gpu_work.num_splits(sizes, 4000)
        assert programs >= 96, (heads, programs)
        # The longest context has no more partial results than this.
        assert heads[1] * gpu_work.num_splits(sizes, 10**6) <= 512


@pytest.mark.parametrize("num_rows", [20, 130])
def test_tables_of_tiles_cover_every_row_once(num_rows: int) -> None:
    """For random batches: all rows of all sequences, by one kind of tile each, in bounds."""
    rng = np.random.default_rng(3)
    sizes, num_sequences = sizes_of((8, 2, 64)), 6
    # With 20 rows the partial results have a place per row, with 130 per sequence and token.
    assert (gpu_work.num_parts(sizes, num_rows, num_sequences) == num_rows) == (num_rows == 20)
    most = gpu_work.most_many_tiles(sizes, num_rows, num_sequences)

    @jax.jit
    def tables(batch: PagedBatch) -> Any:
        few, many = gpu_work.few_tiles(batch, sizes), gpu_work.many_tiles(batch, sizes, most)
        return few, many, gpu_work.make_splits(batch, few, sizes, None, num_rows)[1]

    for _ in range(40):
        ends = np.sort(rng.integers(0, num_rows + 1, num_sequences))
        ends[rng.integers(0, num_sequences) :] = ends[-1]
        q_lens = np.diff(ends, prepend=0)
        cu_q_lens, kv_lens = [0, *ends], q_lens + rng.integers(0, 50, num_sequences)
        few, many, parts = jax.tree.map(
            np.asarray,
            tables(
                PagedBatch(
                    jnp.zeros((num_sequences, 9), jnp.int32),
                    jnp.asarray(cu_q_lens, jnp.int32),
                    jnp.asarray(kv_lens, jnp.int32),
                )
            ),
        )
        found: list[int] = []
        for sequence, row, position, tokens in zip(
            *(np.concatenate(both) for both in zip(few, many, strict=True)), strict=True
        ):
            first, end = cu_q_lens[sequence], cu_q_lens[sequence + 1]
            if tokens:
                assert first <= row < row + tokens <= end
                assert position == kv_lens[sequence] - (end - first) + row - first
            found.extend(range(row, row + tokens))
        assert sorted(found) == list(range(ends[-1]))
        used = parts.row[parts.end > parts.first]
        of_few = np.flatnonzero(np.repeat(q_lens <= sizes.few.tokens, q_lens))
        assert sorted(used) == list(of_few)


FACTS: dict[str, Any] = {
    "platform": "gpu",
    "dtype": "bfloat16",
    "page_dtype": "bfloat16",
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "page_size": 16,
}


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_what_models_need_is_not_refused(head_size: int, page_dtype: str) -> None:
    assert gpu.refusals(**FACTS | {"head_size": head_size, "page_dtype": page_dtype}) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "it runs on gpu, not on cpu"),
        ({"dtype": "float16"}, "q, k and v of float16 are not among float32, bfloat16"),
        ({"page_dtype": "float16"}, "pages of float16 are not among"),
        ({"num_heads": 30}, "30 query heads do not share 8 KV heads evenly"),
        ({"head_size": 512}, "head size 512 is not 1 to 256"),
        ({"page_size": 0}, "page size 0 must be positive"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    (found,) = gpu.refusals(**FACTS | change)
    assert reason in found


@pytest.mark.parametrize(
    ("capability", "page_dtype", "reasons"),
    [
        ("7.5", "bfloat16", ["this GPU has compute capability 7.5, and it needs 8.0"]),
        ("8.6", "float8_e4m3fn", ["this GPU has compute capability 8.6, and it needs 8.9"]),
        ("8.6", "int8", []),
        ("9.0", "float8_e4m3fn", []),
        ("12.0", "float8_e4m3fn", []),
    ],
)
def test_old_gpus_are_refused(
    capability: str, page_dtype: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Device:
        compute_capability = capability

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device()])
    assert gpu.refusals(**FACTS | {"page_dtype": page_dtype}) == reasons


@pytest.mark.parametrize(
    ("dtype", "gibibytes", "fine"),
    [("int8", 2, True), ("int8", 3, False), ("int8", 5, True), ("bfloat16", 3, True)],
)
def test_pools_that_cannot_be_addressed(dtype: str, gibibytes: int, fine: bool) -> None:
    shape = (gibibytes * 2**30 // jnp.dtype(dtype).itemsize // (16 * 64), 1, 16, 64)
    leaf: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if fine:
        gpu._check_offsets(KVPages(leaf, leaf))
    else:
        with pytest.raises(KernelError, match="cannot be addressed on a GPU"):
            gpu._check_offsets(KVPages(leaf, leaf))
