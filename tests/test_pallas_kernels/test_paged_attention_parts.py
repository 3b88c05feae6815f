"""What quantised pages hold and what they cost, and the log-sum-exp with which parts are joined."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.paged_attention import api, cases, cpu, reference
from pallas_kernels.paged_attention.cases import Case, Inputs
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch

pytestmark = pytest.mark.usefixtures("quick_compiler")

NAMES = [name for name in IMPLEMENTATIONS["paged_attention"] if name in ("cpu", "reference")]
BY_NAME = {case.name: case for case in cases.SMALL}


def run(inputs: Inputs, name: str) -> tuple[np.ndarray, KVPages, np.ndarray]:
    call = functools.partial(api.paged_attention_with_lse, implementation=name, **inputs.options)
    out, pages, lse = jax.jit(call)(inputs.q, inputs.k, inputs.v, inputs.pages, inputs.batch)
    assert lse.dtype == jnp.float32
    return np.asarray(out.astype(jnp.float32)), pages, np.asarray(lse)


def row_places(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Page and place in it of every row that is no padding."""
    tables = np.asarray(inputs.batch.block_tables)
    lengths = list(enumerate(zip(case.q_lens, case.kv_lens, strict=True)))
    owners = np.repeat([b for b, _ in lengths], case.q_lens)
    position = np.concatenate([np.arange(kv - q, kv) for _, (q, kv) in lengths])
    return tables[owners, position // case.page_size], position % case.page_size


@pytest.mark.parametrize(
    ("page_dtype", "dtype", "name"),
    [
        *(
            (page, dtype, "cpu")
            for page in reference.QUANTISED
            for dtype in ("float32", "bfloat16")
        ),
        ("int8", "float32", "reference"),
        ("float8_e4m3fn", "bfloat16", "reference"),
    ],
)
def test_rows_are_stored_as_quantise_has_them(page_dtype: str, dtype: str, name: str) -> None:
    """Numbers of many sizes, ties, heads of zeros: the same bits, and the same scales."""
    case = dataclasses.replace(
        BY_NAME["mixed"], num_heads=4, num_kv_heads=2, head_size=32, q_lens=(1, 90, 1, 5)
    )
    inputs = cases.make_inputs(case, page_dtype=page_dtype)
    rng = np.random.default_rng(1)
    shape = inputs.k.shape
    sizes = np.exp(6 * rng.standard_normal((*shape[:2], 1)))
    k = rng.standard_normal(shape) * sizes
    k[0], k[1] = 0.0, np.linspace(-127, 127, shape[2]) / 2  # halves: ties, if the scale is 1/2
    k[1, :, 0] = 63.5
    k[2, :, 1:] = k[2, :, :1] * 2.0 ** -np.arange(1, shape[2])  # the smallest fp8 numbers
    changed = [jnp.asarray(x, dtype) for x in (k, rng.permutation(k))]
    stored = Inputs(
        q=inputs.q.astype(dtype),
        k=changed[0],
        v=changed[1],
        pages=inputs.pages,
        batch=inputs.batch,
        options=inputs.options,
        owned=inputs.owned,
    )
    _, pages, _ = run(stored, name)
    page, place = row_places(case, inputs)
    quantise = jax.jit(functools.partial(reference.quantise, dtype=page_dtype))
    for rows, leaf, scales in zip(changed, pages[:2], pages[2:], strict=True):
        assert scales is not None
        want, want_scales = quantise(rows)
        count = len(page)
        assert np.asarray(leaf)[page, :, place].tobytes() == np.asarray(want)[:count].tobytes()
        got_scales = np.asarray(scales)[page, :, place]
        assert got_scales.tobytes() == np.asarray(want_scales)[:count].tobytes()
        assert not got_scales[~np.asarray(rows)[:count].astype(bool).any(-1)].any()


@pytest.mark.parametrize(("page_dtype", "limit"), [("int8", 0.01), ("float8_e4m3fn", 0.035)])
def test_error_of_quantised_pages(page_dtype: str, limit: float) -> None:
    """Against pages of float32: within a limit, and not zero."""
    case = BY_NAME["decode"]
    exact, _, _ = run(cases.make_inputs(case), "cpu")
    got, _, _ = run(cases.make_inputs(case, page_dtype=page_dtype), "cpu")
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert limit / 4 < error < limit


def expected_lse(case: Case, inputs: Inputs, pages: KVPages) -> np.ndarray:
    """From float64 logits over the pages' contents."""
    queries, tables = np.asarray(inputs.q, np.float64), np.asarray(inputs.batch.block_tables)
    keys = np.asarray(pages.k.astype(jnp.float32), np.float64)
    if pages.k_scale is not None:
        with np.errstate(invalid="ignore"):  # scales of free pages are NaN
            keys = keys * np.asarray(pages.k_scale, np.float64)[..., None]
    lse = np.full(queries.shape[:2], -np.inf)
    sinks = inputs.options["sinks"]
    row = 0
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        position = np.arange(kv_len)
        own = keys[tables[b, position // case.page_size], :, position % case.page_size]
        own = own.repeat(case.num_heads // case.num_kv_heads, axis=1)
        for here in range(kv_len - q_len, kv_len):
            low = 0 if case.window is None else max(0, here - case.window + 1)
            logits = np.einsum("nh,snh->ns", queries[row], own[low : here + 1])
            logits *= inputs.options["scale"]
            if case.soft_cap is not None:
                logits = case.soft_cap * np.tanh(logits / case.soft_cap)
            if sinks is not None:
                column = np.asarray(sinks, np.float64)[:, None]
                logits = np.concatenate((logits, column), axis=1)
            top = logits.max(1)
            lse[row] = top + np.log(np.exp(logits - top[:, None]).sum(1))
            row += 1
    return lse


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("case_name", "page_dtype"),
    [
        ("decode-several-splits", "float32"),
        ("mixed", "float32"),
        ("window-and-sinks", "float32"),
        ("everything", "float32"),
        ("decode", "int8"),
    ],
)
def test_lse(case_name: str, page_dtype: str, name: str) -> None:
    case = BY_NAME[case_name]
    inputs = cases.make_inputs(case, page_dtype=page_dtype)
    _, pages, lse = run(inputs, name)
    np.testing.assert_allclose(lse, expected_lse(case, inputs, pages), rtol=2e-6, atol=2e-6)
    assert (lse[sum(case.q_lens) :] == -np.inf).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sinks", [False, True])
def test_two_parts_merge_to_the_whole(name: str, sinks: bool) -> None:
    """Decodes over the first pages and over the rest; a sink takes part in the second only."""
    case = Case(
        name="parts",
        num_heads=6,
        num_kv_heads=2,
        head_size=16,
        q_lens=(1, 1),
        kv_lens=(600, 70),
        sinks=sinks,
    )
    inputs = cases.make_inputs(case)
    want, pages, want_lse = run(inputs, name)
    tables = np.asarray(inputs.batch.block_tables)
    first = np.array([20, 3])  # pages
    last = tables[np.arange(2), first - 1]

    def part(numbers: tuple[np.ndarray, ...], with_sinks: bool) -> tuple[np.ndarray, np.ndarray]:
        table, lengths, k, v = numbers
        cut = Inputs(
            q=inputs.q,
            k=jnp.asarray(k),
            v=jnp.asarray(v),
            pages=pages,
            batch=PagedBatch(
                jnp.asarray(table), inputs.batch.cu_q_lens, jnp.asarray(lengths, jnp.int32)
            ),
            options=inputs.options if with_sinks else inputs.options | {"sinks": None},
            owned=inputs.owned,
        )
        out, _, lse = run(cut, name)
        return out, lse

    # The first part's last token is written again, as it stands in its page.
    ends = [np.asarray(leaf)[last, :, -1] for leaf in pages[:2]]
    rest = np.stack([np.roll(row, -count) for row, count in zip(tables, first, strict=True)])
    lengths = np.asarray(inputs.batch.kv_lens) - 16 * first
    parts = [
        part((tables, 16 * first, *ends), False),
        part((rest, lengths, np.asarray(inputs.k), np.asarray(inputs.v)), True),
    ]
    outs, lses = (jnp.stack([jnp.asarray(each[i]) for each in parts]) for i in range(2))
    np.testing.assert_allclose(api.merge(outs, lses), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.logaddexp(*lses), want_lse, rtol=1e-6, atol=1e-6)
    swapped = api.merge(outs, lses[::-1])
    assert not np.allclose(swapped, want, rtol=1e-5, atol=1e-6), "the weights make no difference"


def test_kernels_are_found_by_the_next_process() -> None:
    """Machine code is read from disk, not made again."""
    loaded = cpu.load()
    if loaded.folder is None:
        pytest.skip("the cache folder cannot be written")
    program = "from pallas_kernels.paged_attention import cpu; print(cpu.load().from_cache)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


def test_merge_of_rows_that_saw_nothing() -> None:
    """Rows of padding are zeros, not NaN."""
    outs = jnp.zeros((2, 3, 4, 8))
    assert not np.asarray(api.merge(outs, jnp.full((2, 3, 4), -jnp.inf))).any()
