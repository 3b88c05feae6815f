"""The TPU kernel, interpreted on the CPU, against the definition in float32.

Interpreting is compiling a large XLA program, so there are few programs, each for one model's
sizes and options, and every program runs several batches. Free pages, the trash page and places
past the end of a sequence hold NaN, or where they cannot, their scales do; so does memory that a
kernel has not written to yet.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import cases, reference, tpu_attend, tpu_tile
from pallas_kernels.paged_attention.cases import Case, Inputs
from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch, quantise
from pallas_kernels.paged_attention.tpu import paged_attention, paged_attention_with_lse
from pallas_kernels.paged_attention.tpu_blocks import Blocks
from pallas_kernels.paged_attention.tpu_layout import (
    from_pages,
    from_scales,
    to_pages,
    to_scales,
    token_layout,
)
from pallas_kernels.paged_attention.tpu_schedule import Plan

NUM_ROWS, NUM_SEQUENCES, NUM_PAGES, MOST_TOKENS = 32, 5, 48, 320
#: Lengths of queries and of sequences. A tile is 8 tokens, a block 128 or 256, a write 8 or 16.
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((1, 1, 1, 1), (300, 1, 129, 16)),
    "prefill": ((20, 11), (20, 143)),
    "mixed": ((1, 0, 17, 1, 8), (257, 0, 40, 33, 8)),
    "one-token": ((1,), (1,)),
    "nothing": ((), ()),
}
#: Copies happen as late as they may: when they are waited for. Reads outside of a buffer raise.
SIMULATOR = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
#: XLA's quickest compilation: these programs run for milliseconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a program is compiled for."""

    heads: tuple[int, int, int]
    page_size: int = 16
    dtype: str = "float32"
    page_dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    with_lse: bool = False
    interpret: bool | pltpu.InterpretParams = SIMULATOR
    tile_tokens: int = 8
    writes: int = 2
    heads_together: int = 1

    @property
    def blocks(self) -> Blocks:
        tokens = max(128 * token_layout(self.heads[2]).pack, self.page_size)
        return Blocks(tile_tokens=self.tile_tokens, block_tokens=tokens, writes=self.writes)

    def inputs(self, batch: str, seed: int = 0) -> tuple[Case, Inputs]:
        """A batch of BATCHES; all batches have equal shapes."""
        q_lens, kv_lens = BATCHES[batch]
        return self.inputs_of(q_lens, kv_lens, seed)

    def inputs_of(
        self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], seed: int = 0
    ) -> tuple[Case, Inputs]:
        num_heads, num_kv_heads, head_size = self.heads
        case = Case(
            name="interpreted",
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            page_size=self.page_size,
            q_lens=q_lens,
            kv_lens=kv_lens,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            padding_rows=NUM_ROWS - sum(q_lens),
            unused_sequences=NUM_SEQUENCES - len(q_lens),
        )
        owned = sum(-(-kv // self.page_size) for kv in kv_lens)
        inputs = cases.make_inputs(
            case,
            dtype=self.dtype,
            page_dtype=self.page_dtype,
            seed=seed,
            spare_pages=NUM_PAGES - 1 - owned,
        )
        tables = inputs.batch.block_tables
        width = -(-MOST_TOKENS // self.page_size) + 1 - tables.shape[1]
        # Entries that no sequence owns name the trash page.
        batch = inputs.batch._replace(block_tables=jnp.pad(tables, ((0, 0), (0, width))))
        inputs = dataclasses.replace(inputs, batch=batch)
        return case, _with_special_rows(inputs) if self.page_dtype in QUANTISED else inputs


def _with_special_rows(inputs: Inputs) -> Inputs:
    """The first new key is zeros, the first new value half-way between integers when it is divided
    by its scale, 1/128: what 8 bits make of them is easily got wrong."""
    size = inputs.v.shape[2]
    halves = jnp.where(jnp.arange(size) == 5, 254, jnp.arange(size) % 100 * 2 - 99) / 256
    return dataclasses.replace(
        inputs, k=inputs.k.at[0].set(0), v=inputs.v.at[0].set(halves.astype(inputs.v.dtype))
    )


SETTINGS = {
    "two-tokens-a-row": Setting(heads=(6, 2, 64), page_dtype="bfloat16", dtype="bfloat16"),
    "two-tokens-a-row-with-everything": Setting(
        heads=(4, 2, 64), page_size=32, window=150, soft_cap=3.0, sinks=True, writes=3
    ),
    "multi-head-80": Setting(
        heads=(2, 2, 80),
        page_size=64,
        dtype="bfloat16",
        page_dtype="bfloat16",
        window=21,
        heads_together=2,
    ),
    "gemma": Setting(heads=(2, 1, 256), page_size=256, soft_cap=5.0, writes=4, with_lse=True),
    "int8-two-tokens-a-row": Setting(
        heads=(4, 2, 64), page_dtype="int8", window=150, sinks=True, with_lse=True, writes=3
    ),
    # In the other interpreter, in which copies take no time.
    "fp8-large-pages": Setting(
        heads=(1, 1, 256),
        page_size=256,
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
        soft_cap=9.0,
        interpret=True,
        tile_tokens=4,
    ),
    "int8-large-pages-two-tokens-a-row": Setting(
        heads=(1, 1, 64), page_size=256, page_dtype="int8", tile_tokens=4
    ),
}
#: The smallest program, with tiles of one token, for planted mistakes; and with scales.
PLAIN = Setting(heads=(1, 1, 128), window=100, tile_tokens=1)
PLAIN_INT8 = dataclasses.replace(PLAIN, page_dtype="int8")

#: Output, pages in the general layout, and the log-sums of settings that ask for them.
Run = Callable[[Inputs], tuple[np.ndarray, KVPages, np.ndarray | None]]


def _to_tpu(pages: KVPages, head_size: int) -> KVPages:
    values = to_pages(pages.k), to_pages(pages.v)
    if pages.k_scale is None or pages.v_scale is None:
        return KVPages(*values)
    return KVPages(*values, *(to_scales(x, head_size) for x in (pages.k_scale, pages.v_scale)))


def _from_tpu(pages: KVPages, page_size: int, head_size: int) -> KVPages:
    values = from_pages(pages.k, head_size), from_pages(pages.v, head_size)
    scales = [from_scales(x, page_size, head_size) for x in pages[2:] if x is not None]
    return KVPages(*values, *scales)


def compile_for(setting: Setting) -> Run:
    """A function that runs any batch of a setting."""
    _, example = setting.inputs("decode")
    call = functools.partial(
        paged_attention_with_lse if setting.with_lse else paged_attention,
        scale=example.options["scale"],
        window=setting.window,
        soft_cap=setting.soft_cap,
        blocks=setting.blocks,
        interpret=setting.interpret,
    )
    size = setting.heads[2]

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        return inputs.q, inputs.k, inputs.v, _to_tpu(inputs.pages, size), inputs.batch

    sinks = example.options["sinks"]
    jitted = jax.jit(lambda *args, sinks: call(*args, sinks=sinks))
    with pytest.MonkeyPatch.context() as patch:
        # Less code written out side by side is less to compile.
        patch.setattr(tpu_tile, "HEADS_TOGETHER", setting.heads_together)
        program = jitted.lower(*arguments(example), sinks=sinks).compile(compiler_options=QUICK)

    def run(inputs: Inputs) -> tuple[np.ndarray, KVPages, np.ndarray | None]:
        out, pages, *lse = program(*arguments(inputs), sinks=inputs.options["sinks"])
        assert out.dtype == inputs.q.dtype
        pages = _from_tpu(pages, setting.page_size, size)
        return np.asarray(out, np.float32), pages, np.asarray(lse[0]) if lse else None

    return run


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"), compiler_options=QUICK)
def _defined(q: Any, k: Any, v: Any, pages: Any, batch: Any, **options: Any) -> Any:
    return reference.paged_attention_with_lse(q, k, v, pages, batch, **options)


def expected(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The definition's output and log-sums in float32, from the numbers that the kernel gets."""
    q, k, v = (x.astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v))
    pages = inputs.pages
    if pages.k_scale is None:
        pages = KVPages(pages.k.astype(jnp.float32), pages.v.astype(jnp.float32))
    out, _, lse = _defined(q, k, v, pages, inputs.batch, **inputs.options)
    return np.asarray(out), np.asarray(lse)


def expected_pages(inputs: Inputs) -> list[np.ndarray]:
    """The leaves before the call, with what is stored of the rows' keys and values in their places."""
    batch, pages = inputs.batch, inputs.pages
    starts, lengths = np.asarray(batch.cu_q_lens), np.asarray(batch.kv_lens)
    tables = np.asarray(batch.block_tables)
    new: list[Any] = [x.astype(pages.k.dtype) for x in (inputs.k, inputs.v)]
    if pages.k_scale is not None:
        stored = [quantise(x, pages.k.dtype) for x in (inputs.k, inputs.v)]
        new = [x for x, _ in stored] + [scale for _, scale in stored]
    result = []
    for leaf, rows in zip(jax.tree.leaves(pages), new, strict=True):
        want, values = np.array(leaf), np.asarray(rows)
        for b, length in enumerate(lengths):
            for row in range(starts[b], starts[b + 1]):
                position = length - starts[b + 1] + row
                page = tables[b, position // want.shape[2]]
                want[page, :, position % want.shape[2]] = values[row]
        result.append(want)
    return result


def assert_right(
    setting: Setting, inputs: Inputs, out: np.ndarray, pages: KVPages, lse: np.ndarray | None
) -> None:
    """Output near the definition's; pages exactly as they must be, the trash page untouched."""
    want, want_lse = expected(inputs)
    # bfloat16 rounds the result, and where pages are not float32, the softmax weights.
    rounded = setting.page_dtype != "float32"
    limit = {"float32": 3e-6, "bfloat16": 2.0**-8 * (3.0 if rounded else 1.01)}[setting.dtype]
    worst = np.abs(out - want) / np.maximum(1.0, np.abs(want))
    assert not np.isnan(out).any(), "a NaN from where there is nothing to see came through"
    assert worst.max(initial=0.0) <= limit, f"off by {worst.max():.1e}, allowed are {limit:.1e}"
    if lse is not None:
        np.testing.assert_allclose(lse, want_lse, rtol=3e-6, atol=3e-6, strict=True)
        assert np.isneginf(lse[int(inputs.batch.cu_q_lens[-1]) :]).all()
    for got, exact in zip(jax.tree.leaves(pages), expected_pages(inputs), strict=True):
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(exact, np.float32), strict=True
        )


#: Not in every run of the tests: what they alone would find is rare.
SLOW = {"two-tokens-a-row", "int8-large-pages-two-tokens-a-row", "int8-mask", "int8-stale-scales"}
#: Batches that only the smallest programs run in every run, too.
FEW = {"one-token", "nothing", "prefill"}


def _names(names: Iterable[str]) -> list[Any]:
    return [pytest.param(x, marks=pytest.mark.slow if x in SLOW else []) for x in names]


@pytest.fixture(scope="module", params=_names(SETTINGS))
def program(request: pytest.FixtureRequest) -> tuple[Setting, Run]:
    """Each setting with its program; tests of one program run together, then it is dropped."""
    setting = SETTINGS[request.param]
    return setting, compile_for(setting)


@pytest.mark.parametrize(
    "batch", [pytest.param(x, marks=pytest.mark.slow if x in FEW else []) for x in BATCHES]
)
def test_equals_the_definition(program: tuple[Setting, Run], batch: str) -> None:
    setting, run = program
    _, inputs = setting.inputs(batch)
    assert_right(setting, inputs, *run(inputs))


def test_company_makes_no_difference(program: tuple[Setting, Run]) -> None:
    """The third sequence of a batch gives the same bits when it is alone, in other rows."""
    setting, run = program
    case, inputs = setting.inputs("mixed")
    start = sum(case.q_lens[:2])
    rows = slice(start, start + case.q_lens[2])
    with_others = run(inputs)[0][rows]

    def alone(x: jax.Array, part: slice) -> jax.Array:
        result, values = np.zeros(x.shape, x.dtype), np.asarray(x)[part]
        result[: len(values)] = values
        return jnp.asarray(result)

    ends = np.minimum(np.arange(NUM_SEQUENCES + 1), 1) * case.q_lens[2]
    tables, _, lengths = inputs.batch
    batch = PagedBatch(
        alone(tables, slice(2, 3)), jnp.asarray(ends, jnp.int32), alone(lengths, slice(2, 3))
    )
    single = dataclasses.replace(
        inputs,
        q=alone(inputs.q, rows),
        k=alone(inputs.k, rows),
        v=alone(inputs.v, rows),
        batch=batch,
    )
    assert with_others.tobytes() == run(single)[0][: case.q_lens[2]].tobytes()


def _sees_one_token_more(plan: Plan, shape: tuple[int, ...], furthest: jax.Array) -> jax.Array:
    return SEEN(plan, shape, furthest + 1)


def _without_waiting(*arguments: Any) -> None:
    """Starts the copies of pages and never waits for them."""
    if arguments[-1] is tpu_attend._start:
        EACH_PAGE(*arguments)


def _of_the_sequence_before(refs: Any, plan: Plan, cursor: Any, *rest: Any) -> None:
    """Reads the table one entry too far: the page that comes next is not the sequence's own."""
    shifted = dataclasses.replace(plan, facts=dataclasses.replace(plan.facts, pages_per_sequence=1))
    EACH_PAGE(refs, shifted, cursor, *rest)


SEEN, EACH_PAGE = tpu_tile._seen, tpu_attend._each_page


def _scales_of_the_other_block(
    ref: Any, facts: Any, blocks: Any, slot: Any, head: Any
) -> tuple[jax.Array, ...]:
    """The scales of a block that is no longer, or not yet, there."""
    return BLOCK_SCALES(ref, facts, blocks, 1 - slot, head)


BLOCK_SCALES = tpu_tile.block_scales
MISTAKES = {
    "mask": (PLAIN, tpu_tile, "_seen", _sees_one_token_more),
    "stale-page": (PLAIN, tpu_attend, "_each_page", _of_the_sequence_before),
    "no-wait": (PLAIN, tpu_attend, "_each_page", _without_waiting),
    "int8-mask": (PLAIN_INT8, tpu_tile, "_seen", _sees_one_token_more),
    "int8-stale-page": (PLAIN_INT8, tpu_attend, "_each_page", _of_the_sequence_before),
    "int8-stale-scales": (PLAIN_INT8, tpu_tile, "block_scales", _scales_of_the_other_block),
}


@pytest.mark.parametrize("mistake", _names(MISTAKES))
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, module, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong)
    _, inputs = setting.inputs_of((1, 2, 1), (130, 40, 16))
    with pytest.raises(AssertionError):
        assert_right(setting, inputs, *compile_for(setting)(inputs))


@pytest.mark.parametrize("setting", [PLAIN, PLAIN_INT8], ids=["plain", "int8"])
def test_the_program_with_no_mistake_is_right(setting: Setting) -> None:
    """So that a planted mistake cannot be 'found' because the small program is wrong anyway."""
    run = compile_for(setting)
    batches = [setting.inputs(batch) for batch in sorted(FEW)]
    for _, inputs in [setting.inputs_of((1, 2, 1), (130, 40, 16)), *batches]:
        assert_right(setting, inputs, *run(inputs))
