"""Every implementation of paged attention against dense attention in float64, case by case."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.paged_attention import api, cases, reference
from pallas_kernels.paged_attention.cases import Case, Inputs
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch

pytestmark = pytest.mark.usefixtures("quick_compiler")

NAMES = [name for name in IMPLEMENTATIONS["paged_attention"] if name in ("cpu", "reference")]
BY_NAME = {case.name: case for case in cases.SMALL}
OTHER_DTYPES = ("decode", "mixed", "everything", "head-size-3")
#: Every case in float32, some with other dtypes of q, k and v, and of the pages.
CASES = [
    *((case, "float32", "float32") for case in cases.SMALL),
    *((BY_NAME[n], "bfloat16", p) for n in OTHER_DTYPES for p in ("float32", "bfloat16")),
    *((BY_NAME[n], "float32", p) for n in OTHER_DTYPES for p in reference.QUANTISED),
    (BY_NAME["mixed"], "bfloat16", "int8"),
]
#: Other sizes that mean nothing to the definition: only in slow runs.
DEFINED_SLOWLY = {"ragged", "prefill", "multi-head", "wide-group", "odd-group", "head-size-10"} | {
    *("head-size-128", "head-size-256", "window", "soft-cap", "sinks", "page-size-1"),
}


def _calls() -> list[Any]:
    """Case, dtypes and implementation of every test."""
    calls = []
    for (case, *dtypes), name in itertools.product(CASES, NAMES):
        slow = name == "reference" and case.name in DEFINED_SLOWLY
        label = "-".join((case.name, *dtypes, name))
        marks = [pytest.mark.slow] if slow else []
        calls.append(pytest.param(case, *dtypes, name, id=label, marks=marks))
    return calls


def run(inputs: Inputs, implementation: str = "cpu") -> tuple[np.ndarray, KVPages]:
    """Output as float32, and the pages after the call."""
    call = functools.partial(api.paged_attention, implementation=implementation, **inputs.options)
    out, pages = jax.jit(call)(inputs.q, inputs.k, inputs.v, inputs.pages, inputs.batch)
    assert out.dtype == inputs.q.dtype
    return np.asarray(out.astype(jnp.float32)), pages


def stored(leaf: jax.Array, scale: jax.Array | None) -> np.ndarray:
    """What the pages' numbers stand for, float64."""
    numbers = np.asarray(leaf.astype(jnp.float32), np.float64)
    if scale is None:
        return numbers
    with np.errstate(invalid="ignore"):  # scales of free pages are NaN
        return numbers * np.asarray(scale, np.float64)[..., None]


def expected(case: Case, inputs: Inputs, pages: KVPages) -> np.ndarray:
    """Dense attention in float64 over the pages' contents after the call."""
    queries, tables = np.asarray(inputs.q, np.float64), np.asarray(inputs.batch.block_tables)
    out = np.zeros_like(queries)
    group = case.num_heads // case.num_kv_heads
    options = inputs.options
    row = 0
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        position = np.arange(kv_len)
        keys, values = (
            stored(leaf, scale)[
                tables[b, position // case.page_size], :, position % case.page_size
            ].repeat(group, axis=1)
            for leaf, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
        )
        here = np.arange(kv_len - q_len, kv_len)
        logits = options["scale"] * np.einsum("tnh,snh->nts", queries[row : row + q_len], keys)
        if case.soft_cap is not None:
            logits = case.soft_cap * np.tanh(logits / case.soft_cap)
        seen = position[None] <= here[:, None]
        if case.window is not None:
            seen &= position[None] > here[:, None] - case.window
        weights = np.exp(logits) * seen
        total = weights.sum(-1)
        if options["sinks"] is not None:
            total = total + np.exp(np.asarray(options["sinks"], np.float64))[:, None]
        weights /= total[..., None]
        out[row : row + q_len] = np.einsum("nts,snh->tnh", weights, values)
        row += q_len
    return out


def tolerance(case: Case, dtype: str) -> float:
    """Rounding of the result, and of sums over H and over the context in float32."""
    longest = max((1, *case.kv_lens))
    return float(jnp.finfo(dtype).eps) + 8e-7 * float(np.sqrt(case.head_size + longest) / 8 + 1)


def assert_close(got: np.ndarray, want: np.ndarray, case: Case, dtype: str) -> None:
    assert not np.isnan(got).any(), "a NaN of a page that is not ours came through"
    limit = tolerance(case, dtype) * np.maximum(1.0, np.abs(want))
    worst = np.max(np.abs(got - want) / limit, initial=0.0)
    assert worst <= 1.0, f"{case.name}: {worst:.2f} times the tolerance"


@pytest.mark.parametrize(("case", "dtype", "page_dtype", "name"), _calls())
def test_equals_dense_attention(case: Case, dtype: str, page_dtype: str, name: str) -> None:
    inputs = cases.make_inputs(case, dtype=dtype, page_dtype=page_dtype)
    got, pages = run(inputs, name)
    assert_close(got, expected(case, inputs, pages), case, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case_name", ["mixed", "head-size-10", "everything", "decode"])
def test_writes_its_rows_and_nothing_else(case_name: str, name: str) -> None:
    case = BY_NAME[case_name]
    inputs = cases.make_inputs(case)
    _, pages = run(inputs, name)
    for before, after, rows in zip(inputs.pages[:2], pages[:2], (inputs.k, inputs.v), strict=True):
        want = np.array(before)
        row = 0
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
            for position in range(kv_len - q_len, kv_len):
                page = int(inputs.batch.block_tables[b, position // case.page_size])
                want[page, :, position % case.page_size] = rows[row]
                row += 1
        # Page 0 is the trash page: what is in it means nothing.
        assert np.asarray(after)[1:].tobytes() == want[1:].tobytes()


@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
def test_pages_are_donated_in_place(page_dtype: str) -> None:
    """Scales, where there are any, too."""
    inputs = cases.make_inputs(BY_NAME["mixed"], page_dtype=page_dtype)
    call = jax.jit(
        functools.partial(api.paged_attention, implementation="cpu", **inputs.options),
        donate_argnums=(3,),
    )
    pages = jax.tree.map(lambda leaf: leaf + 0, inputs.pages)  # jax's own memory, not numpy's
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)]
    for _ in range(3):
        _, pages = call(inputs.q, inputs.k, inputs.v, pages, inputs.batch)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)] == before


def pick_sequence(inputs: Inputs, case: Case, b: int) -> tuple[Inputs, slice]:
    """The same call with sequence b alone, and the rows that it had."""
    start = sum(case.q_lens[:b])
    rows = slice(start, start + case.q_lens[b])
    batch = PagedBatch(
        inputs.batch.block_tables[b : b + 1],
        jnp.array([0, case.q_lens[b]], jnp.int32),
        inputs.batch.kv_lens[b : b + 1],
    )
    alone = Inputs(
        q=inputs.q[rows],
        k=inputs.k[rows],
        v=inputs.v[rows],
        pages=inputs.pages,
        batch=batch,
        options=inputs.options,
        owned=inputs.owned,
    )
    return alone, rows


COMPANY = [(name, "float32") for name in ("mixed", "decode", "everything", "ragged")] + [
    ("mixed", page_dtype) for page_dtype in ("bfloat16", "int8", "float8_e4m3fn")
]


@pytest.mark.parametrize(("case_name", "page_dtype"), COMPANY)
def test_company_makes_no_difference(case_name: str, page_dtype: str) -> None:
    """Bit for bit the same alone and in a batch."""
    case = BY_NAME[case_name]
    inputs = cases.make_inputs(case, page_dtype=page_dtype)
    together, _ = run(inputs)
    for b in range(len(case.q_lens)):
        alone, rows = pick_sequence(inputs, case, b)
        assert run(alone)[0].tobytes() == together[rows].tobytes()


CHUNKS = [
    *((name, "float32") for name in ("prefill-of-many-tiles", "everything", "gemma", "odd-group")),
    *(("everything", page_dtype) for page_dtype in ("bfloat16", "int8", "float8_e4m3fn")),
]


@pytest.mark.parametrize(("case_name", "page_dtype"), CHUNKS)
def test_chunks_make_no_difference(case_name: str, page_dtype: str) -> None:
    """A row's result is bit for bit the same in a long chunk, short ones, and as a decode."""
    case = BY_NAME[case_name]
    b = int(np.argmax(case.q_lens))
    whole, _ = pick_sequence(cases.make_inputs(case, page_dtype=page_dtype), case, b)
    want, _ = run(whole)
    q_len, kv_len = case.q_lens[b], case.kv_lens[b]
    for size in (1, 7, 64):
        if size == 1 and q_len > 40:
            continue
        pages, parts = whole.pages, []
        call = jax.jit(
            functools.partial(api.paged_attention, implementation="cpu", **whole.options)
        )
        for start in range(0, q_len, size):
            end = min(start + size, q_len)
            batch = PagedBatch(
                whole.batch.block_tables,
                jnp.array([0, end - start], jnp.int32),
                jnp.array([kv_len - q_len + end], jnp.int32),
            )
            out, pages = call(
                whole.q[start:end], whole.k[start:end], whole.v[start:end], pages, batch
            )
            parts.append(np.asarray(out))
        assert np.concatenate(parts).tobytes() == want.tobytes(), f"chunks of {size}"


def make_mesh(parts: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:parts], dtype=object)
    return jax.sharding.Mesh(devices, ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))


SPLITS = [("cpu", 2, "float32"), ("cpu", 4, "float32"), ("cpu", 2, "int8")]


@pytest.mark.parametrize(("name", "parts", "page_dtype"), [*SPLITS, ("reference", 2, "float32")])
def test_kv_heads_split_over_devices(name: str, parts: int, page_dtype: str) -> None:
    """Under shard_map the devices call concurrently, each in place on its own KV heads."""
    case = cases.Case(
        name="sharded",
        num_heads=8,
        num_kv_heads=4,
        head_size=16,
        q_lens=(1, 30, 1),
        kv_lens=(700, 60, 5),
        sinks=True,
        padding_rows=4,
    )
    inputs = cases.make_inputs(case, page_dtype=page_dtype)
    mesh = make_mesh(parts)
    spec = jax.P(None, "tensor")
    options = {key: value for key, value in inputs.options.items() if key != "sinks"}

    def attend(q: Any, k: Any, v: Any, pages: Any, batch: Any, sinks: Any) -> Any:
        return api.paged_attention(
            q, k, v, pages, batch, implementation=name, sinks=sinks, **options
        )

    sharded = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(spec, spec, spec, spec, jax.P(), jax.P("tensor")),
            out_specs=(spec, spec),
            check_vma=False,
        ),
        donate_argnums=(3,),
    )
    pages = jax.device_put(inputs.pages, jax.NamedSharding(mesh, spec))
    before = [
        s.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(pages)
        for s in leaf.addressable_shards
    ]
    arguments = (inputs.q, inputs.k, inputs.v)
    want, _ = run(inputs, name)
    for _ in range(20):
        out, pages = sharded(*arguments, pages, inputs.batch, inputs.options["sinks"])
        after = [
            s.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(pages)
            for s in leaf.addressable_shards
        ]
        if name == "cpu":
            assert after == before
            assert np.asarray(out).tobytes() == want.tobytes()
        else:
            np.testing.assert_allclose(np.asarray(out), want, atol=1e-6)


def shift_mask(inputs: Inputs) -> Inputs:
    """Off by one: the last key of each sequence goes unseen."""
    lengths = jnp.where(inputs.batch.kv_lens > 1, inputs.batch.kv_lens - 1, inputs.batch.kv_lens)
    return _with_batch(inputs, inputs.batch._replace(kv_lens=lengths))


def stale_page(inputs: Inputs) -> Inputs:
    """The first page of each sequence is one that it does not own."""
    tables = np.array(inputs.batch.block_tables)
    free = set(range(1, inputs.pages.k.shape[0])) - {int(i) for i in inputs.owned}
    tables[:, 0] = free.pop()
    return _with_batch(inputs, inputs.batch._replace(block_tables=jnp.asarray(tables)))


def _with_batch(inputs: Inputs, batch: PagedBatch) -> Inputs:
    fields = {name: getattr(inputs, name) for name in ("q", "k", "v", "pages", "options", "owned")}
    return Inputs(batch=batch, **fields)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plant", [shift_mask, stale_page])
@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
def test_planted_faults_are_found(
    plant: Callable[[Inputs], Inputs], name: str, page_dtype: str
) -> None:
    case = BY_NAME["decode"]
    inputs = cases.make_inputs(case, page_dtype=page_dtype)
    _, pages = run(inputs, name)
    want = expected(case, inputs, pages)
    got, _ = run(plant(inputs), name)
    with pytest.raises(AssertionError):
        assert_close(got, want, case, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": jnp.array([10_000], jnp.int32)}, "do not agree"),
        ({"kv_lens": jnp.array([3], jnp.int32)}, "do not agree"),
        ({"cu_q_lens": jnp.array([0, 71], jnp.int32)}, "do not agree"),
        ({"cu_q_lens": jnp.array([-1, 70], jnp.int32)}, "do not agree"),
        ({"block_tables": jnp.full((1, 6), 999, jnp.int32)}, "names no page"),
        ({"block_tables": jnp.full((1, 6), -1, jnp.int32)}, "names no page"),
    ],
)
def test_contradictions_end_in_an_error(change: dict[str, jax.Array], message: str) -> None:
    """Not in reads and writes outside of the pool; and the next call works."""
    inputs = cases.make_inputs(BY_NAME["prefill"])
    wrong = _with_batch(inputs, inputs.batch._replace(**change))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(wrong)
    assert not np.isnan(run(inputs)[0]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((70, 2, 8))}, "must be"),
        ({"q": jnp.zeros((70, 5, 16))}, "do not share"),
        ({"options": {"scale": 1.0, "window": 0}}, "window is 0"),
        ({"options": {"scale": 1.0, "soft_cap": -1.0}}, "soft_cap is -1"),
        ({"options": {"scale": 1.0, "sinks": jnp.zeros(3)}}, "sinks must be"),
    ],
)
def test_shapes_that_contradict_are_refused(change: dict[str, Any], message: str) -> None:
    inputs = cases.make_inputs(BY_NAME["prefill"])
    fields = {name: getattr(inputs, name) for name in ("q", "k", "v", "pages", "batch", "options")}
    wrong = Inputs(owned=inputs.owned, **fields | change)
    with pytest.raises(ValueError, match=message):
        run(wrong)


def test_values_that_are_not_numbers_stay_visible() -> None:
    """A NaN among a sequence's own keys is not hidden by the softmax."""
    inputs = cases.make_inputs(BY_NAME["prefill"])
    broken = Inputs(
        q=inputs.q,
        k=inputs.k.at[10].set(jnp.nan),
        v=inputs.v,
        pages=inputs.pages,
        batch=inputs.batch,
        options=inputs.options,
        owned=inputs.owned,
    )
    got, _ = run(broken)
    assert not np.isnan(got[:10]).any()
    assert np.isnan(got[10:]).all()


def test_a_pool_has_the_shape_that_its_implementation_reads() -> None:
    assert api.page_shape(9, 4, 16, 64, implementation="cpu") == (9, 4, 16, 64)
    assert api.page_shape(9, 4, 16, 64, implementation="tpu") == (9, 4, 8, 128)
    assert api.page_shape(9, 4, 16, 80, implementation="tpu") == (9, 4, 16, 128)


def test_make_pages() -> None:
    pages = api.make_pages(300, 4, 16, 32, jnp.float32, implementation="reference")
    assert pages.k.shape == pages.v.shape == (300, 4, 16, 32)
    assert not np.asarray(pages.v).any()
    sharding = jax.NamedSharding(make_mesh(2), jax.P(None, "tensor"))
    assert (
        api.make_pages(8, 4, 16, 32, implementation="cpu", sharding=sharding).k.sharding == sharding
    )
    assert reference.KVPages is api.KVPages
