"""The TPU kernel, interpreted on the CPU, against the definition in float32.

Interpreting is compiling a large XLA program, so there are few programs, each for one model's
sizes and options, and every program runs several batches. Free pages, the trash page and places
past the end of a sequence hold NaN; so does memory that a kernel has not written to yet.
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import cases, reference, tpu_attend, tpu_tile
from pallas_kernels.paged_attention.cases import Case, Inputs
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch
from pallas_kernels.paged_attention.tpu import paged_attention
from pallas_kernels.paged_attention.tpu_blocks import Blocks
from pallas_kernels.paged_attention.tpu_layout import from_pages, to_pages, token_layout
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
        return case, dataclasses.replace(inputs, batch=batch)


SETTINGS = {
    "two-tokens-a-row": Setting(heads=(6, 2, 64), page_dtype="bfloat16", dtype="bfloat16"),
    "two-tokens-a-row-with-everything": Setting(
        heads=(4, 2, 64), page_size=32, window=150, soft_cap=3.0, sinks=True, writes=3
    ),
    "multi-head-80": Setting(
        heads=(2, 2, 80), page_size=64, dtype="bfloat16", window=21, heads_together=2
    ),
    "gemma": Setting(heads=(2, 1, 256), page_size=256, soft_cap=5.0, writes=4),
}
#: The smallest program, with tiles of one token, for planted mistakes.
PLAIN = Setting(heads=(1, 1, 128), window=100, tile_tokens=1)

Run = Callable[[Inputs], tuple[np.ndarray, KVPages]]


def compile_for(setting: Setting) -> Run:
    """A function that runs any batch of a setting."""
    _, example = setting.inputs("decode")
    call = functools.partial(
        paged_attention,
        scale=example.options["scale"],
        window=setting.window,
        soft_cap=setting.soft_cap,
        blocks=setting.blocks,
        interpret=SIMULATOR,
    )

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        pages = KVPages(*(to_pages(leaf) for leaf in inputs.pages[:2]))
        return inputs.q, inputs.k, inputs.v, pages, inputs.batch

    sinks = example.options["sinks"]
    jitted = jax.jit(lambda *args, sinks: call(*args, sinks=sinks))
    with pytest.MonkeyPatch.context() as patch:
        # Less code written out side by side is less to compile.
        patch.setattr(tpu_tile, "HEADS_TOGETHER", setting.heads_together)
        program = jitted.lower(*arguments(example), sinks=sinks).compile(compiler_options=QUICK)

    def run(inputs: Inputs) -> tuple[np.ndarray, KVPages]:
        out, pages = program(*arguments(inputs), sinks=inputs.options["sinks"])
        assert out.dtype == inputs.q.dtype
        size = inputs.q.shape[2]
        return np.asarray(out, np.float32), KVPages(*(from_pages(leaf, size) for leaf in pages[:2]))

    return run


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"), compiler_options=QUICK)
def _defined(q: Any, k: Any, v: Any, pages: Any, batch: Any, **options: Any) -> Any:
    return reference.paged_attention(q, k, v, pages, batch, **options)


def expected(inputs: Inputs) -> np.ndarray:
    """The definition's output in float32, from the numbers that the kernel gets."""
    q, k, v, pages = jax.tree.map(
        lambda x: x.astype(jnp.float32), (inputs.q, inputs.k, inputs.v, inputs.pages)
    )
    out, _ = _defined(q, k, v, pages, inputs.batch, **inputs.options)
    return np.asarray(out)


def expected_pages(inputs: Inputs) -> list[np.ndarray]:
    """The pages before the call, with the rows' keys and values in their places."""
    batch = inputs.batch
    starts, lengths = np.asarray(batch.cu_q_lens), np.asarray(batch.kv_lens)
    tables = np.asarray(batch.block_tables)
    result = []
    for leaf, rows in zip(inputs.pages[:2], (inputs.k, inputs.v), strict=True):
        want = np.array(leaf)
        for b, length in enumerate(lengths):
            for row in range(starts[b], starts[b + 1]):
                position = length - starts[b + 1] + row
                page = tables[b, position // want.shape[2]]
                want[page, :, position % want.shape[2]] = np.asarray(rows[row], want.dtype)
        result.append(want)
    return result


def assert_right(setting: Setting, inputs: Inputs, out: np.ndarray, pages: KVPages) -> None:
    """Output near the definition's; pages exactly as they must be, the trash page untouched."""
    want = expected(inputs)
    both = setting.dtype == setting.page_dtype == "bfloat16"
    # bfloat16 rounds the result, and where pages are bfloat16 too, the softmax weights.
    limit = {"float32": 3e-6, "bfloat16": 2.0**-8 * (3.0 if both else 1.01)}[setting.dtype]
    worst = np.abs(out - want) / np.maximum(1.0, np.abs(want))
    assert not np.isnan(out).any(), "a NaN from where there is nothing to see came through"
    assert worst.max(initial=0.0) <= limit, f"off by {worst.max():.1e}, allowed are {limit:.1e}"
    for got, exact in zip(pages[:2], expected_pages(inputs), strict=True):
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(exact, np.float32), strict=True
        )


@pytest.fixture(scope="module", params=SETTINGS)
def program(request: pytest.FixtureRequest) -> tuple[Setting, Run]:
    """Each setting with its program; tests of one program run together, then it is dropped."""
    setting = SETTINGS[request.param]
    return setting, compile_for(setting)


@pytest.mark.parametrize("batch", BATCHES)
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


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (tpu_tile, "_seen", _sees_one_token_more),
        (tpu_attend, "_each_page", _of_the_sequence_before),
        (tpu_attend, "_each_page", _without_waiting),
    ],
    ids=["mask", "stale-page", "no-wait"],
)
def test_a_planted_mistake_is_found(
    module: Any, name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mistake)
    _, inputs = PLAIN.inputs_of((1, 2, 1), (130, 40, 16))
    with pytest.raises(AssertionError):
        assert_right(PLAIN, inputs, *compile_for(PLAIN)(inputs))


def test_the_program_with_no_mistake_is_right() -> None:
    """So that a planted mistake cannot be 'found' because the small program is wrong anyway."""
    _, inputs = PLAIN.inputs_of((1, 2, 1), (130, 40, 16))
    assert_right(PLAIN, inputs, *compile_for(PLAIN)(inputs))
