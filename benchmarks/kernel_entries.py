"""What `benchmarks/kernels.py` runs: per op and named case, our call, the definition, XLA's best.

An entry's runners start one call each and return something to wait for. "ours" is what `dispatch`
chooses on this machine.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ceilings import Runner
from jax import lax
from paged_attention import xla_gathered, xla_mapped, xla_prefill

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.quantized_matmul import api as quantized_api
from pallas_kernels.quantized_matmul import cases as quantized_cases
from pallas_kernels.sample import api as sample_api
from pallas_kernels.sample import cases as sample_cases

OURS, REFERENCE = "ours", "reference"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table. runners: OURS, REFERENCE (missing where it would need too much
    memory) and any number of XLA formulations. num_bytes: that must be read at least; operations:
    that must be done at least, on numbers of operand_dtype.
    """

    op: str
    case: str
    choice: str
    num_bytes: float
    operations: float
    operand_dtype: str
    runners: Mapping[str, Runner]


Maker = Callable[[], Entry]
#: Operations of a call that a CPU does in a second or so.
CPU_OPERATIONS = 2e10


def affordable(operations: float, large: bool = False) -> bool:
    """Whether a call is run on this machine; `large` lets everything through."""
    return large or jax.default_backend() != "cpu" or operations <= CPU_OPERATIONS


def attention(page_size: int, page_dtype: str) -> Iterator[tuple[str, Maker]]:
    """Named cases of paged attention, each with what makes its entry."""
    for case in attention_cases.FULL:
        sized = dataclasses.replace(case, page_size=page_size)
        yield case.name, functools.partial(_attention_entry, sized, page_dtype)


def _attention_entry(case: attention_cases.Case, page_dtype: str) -> Entry:
    dtype = jnp.float32 if page_dtype == "float32" else jnp.bfloat16
    choice = dispatch.choose(
        "paged_attention",
        platform=jax.default_backend(),
        dtype=dtype,
        page_dtype=page_dtype,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        page_size=case.page_size,
    )
    inputs = attention_cases.make_inputs(case, dtype=dtype, page_dtype=page_dtype, poison=False)
    plain = functools.partial(_attention_runner, inputs)
    runners = {
        OURS: plain(functools.partial(attention_api.paged_attention, implementation=choice), choice)
    }
    if sum(case.q_lens) * max(case.kv_lens) <= 2**18:
        reference = functools.partial(
            attention_api.paged_attention, implementation=dispatch.REFERENCE
        )
        runners[REFERENCE] = plain(reference, dispatch.REFERENCE)
    if page_dtype not in attention_api.QUANTISED:
        names = {"xla mapped": xla_mapped, "xla gathered": xla_gathered}
        if max(case.q_lens) > 1:
            names = {"xla prefill": xla_prefill}
        runners |= {name: plain(call, dispatch.REFERENCE) for name, call in names.items()}
    scale_bytes = 4 / case.head_size if page_dtype in attention_api.QUANTISED else 0
    pairs = sum(q * kv - q * (q - 1) / 2 for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return Entry(
        op="paged_attention",
        case=f"{case.name} {page_dtype}",
        choice=choice.implementation,
        num_bytes=case.kv_elements * (jnp.dtype(page_dtype).itemsize + scale_bytes),
        operations=4 * pairs * case.num_heads * case.head_size,
        operand_dtype=jnp.dtype(dtype).name,
        runners=runners,
    )


def _attention_runner(
    inputs: attention_cases.Inputs, attend: Callable[..., Any], layout: dispatch.Choice | str
) -> Runner:
    """Calls with the pool donated; every implementation gets a pool in its own layout."""
    num_pages, num_kv_heads, page_size, head_size = inputs.pages.k.shape
    pool = [
        attention_api.make_pages(
            num_pages,
            num_kv_heads,
            page_size,
            head_size,
            inputs.pages.k.dtype,
            implementation=layout,
        )
    ]
    scale = inputs.options["scale"]
    call = jax.jit(functools.partial(attend, scale=scale), donate_argnums=(3,))

    def run() -> object:
        out, pool[0] = call(inputs.q, inputs.k, inputs.v, pool[0], inputs.batch)
        return out

    jax.block_until_ready(run())
    return run


def quantized(scheme_names: tuple[str, ...], large: bool) -> Iterator[tuple[str, Maker]]:
    """Named products, with each scheme whose groups fit."""
    for scheme_name in scheme_names:
        scheme = quantized_api.named_scheme(scheme_name)
        for case in quantized_cases.FULL:
            if case.fits(scheme) and affordable(case.operations, large):
                yield case.name, functools.partial(_quantized_entry, case, scheme, scheme_name)


def _quantized_entry(
    case: quantized_cases.Case, scheme: quantized_api.Scheme, scheme_name: str
) -> Entry:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    choice = dispatch.choose(
        "quantized_matmul",
        platform=jax.default_backend(),
        dtype=dtype,
        scheme=scheme,
        out_size=case.out_size,
        in_size=case.in_size,
    )
    inputs = quantized_cases.make_inputs(case, scheme, dtype=dtype)
    packed = quantized_api.pack(inputs.weight, scheme, implementation=choice)
    wide = quantized_api.dequantize(inputs.weight, scheme).astype(dtype)
    ours = functools.partial(quantized_api.quantized_matmul, implementation=choice)
    reference = functools.partial(quantized_api.quantized_matmul, implementation=dispatch.REFERENCE)

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        out = lax.dot_general(
            x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return out.astype(x.dtype)

    return Entry(
        op="quantized_matmul",
        case=f"{case.name} {scheme_name}",
        choice=choice.implementation,
        num_bytes=case.weight_bytes(scheme),
        operations=case.operations,
        operand_dtype=jnp.dtype(dtype).name,
        runners={
            OURS: _runner(lambda x, weight: ours(x, weight, scheme), inputs.x, packed),
            REFERENCE: _runner(
                lambda x, weight: reference(x, weight, scheme), inputs.x, inputs.weight
            ),
            f"xla {jnp.dtype(dtype).name}": _runner(multiply, inputs.x, wide),
        },
    )


def grouped(large: bool) -> Iterator[tuple[str, Maker]]:
    """Named grouped products."""
    for case in grouped_cases.FULL:
        if affordable(2 * case.num_rows * case.in_size * case.out_size, large):
            yield case.name, functools.partial(_grouped_entry, case)


def _grouped_entry(case: grouped_cases.Case) -> Entry:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    choice = dispatch.choose("grouped_matmul", platform=jax.default_backend(), dtype=dtype)
    x, weights, sizes = grouped_cases.make_inputs(case, dtype)
    weights = jnp.nan_to_num(weights)
    busy = int(jnp.sum(sizes > 0))
    call = functools.partial(grouped_api.grouped_matmul, implementation=choice)
    runners = {OURS: _runner(call, x, weights, sizes)}
    operations = 2 * case.num_rows * case.in_size * case.out_size
    if affordable(operations * case.num_groups / 4):  # off TPUs XLA computes every group
        runners["xla ragged_dot"] = _runner(lax.ragged_dot, x, weights, sizes)
    return Entry(
        op="grouped_matmul",
        case=case.name,
        choice=choice.implementation,
        num_bytes=busy * case.in_size * case.out_size * jnp.dtype(dtype).itemsize,
        operations=operations,
        operand_dtype=jnp.dtype(dtype).name,
        runners=runners,
    )


def sample() -> Iterator[tuple[str, Maker]]:
    """Named calls of sampling; beside them the matmul that makes the logits."""
    for case in sample_cases.FULL:
        yield case.name, functools.partial(_sample_entry, case)


def _sample_entry(case: sample_cases.Case) -> Entry:
    choice = dispatch.choose("sample", platform=jax.default_backend(), vocab_size=case.vocab_size)
    arguments = sample_cases.make_inputs(case)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    hidden = jnp.ones((case.rows, case.hidden_size), dtype)
    head = jnp.ones((case.vocab_size, case.hidden_size), dtype)

    def run(implementation: dispatch.Choice | str) -> Runner:
        call = functools.partial(sample_api.sample, implementation=implementation)
        return _runner(call, *arguments)

    return Entry(
        op="sample",
        case=case.name,
        choice=choice.implementation,
        num_bytes=4 * case.rows * case.vocab_size,
        operations=0,
        operand_dtype="float32",
        runners={
            OURS: run(choice),
            REFERENCE: run(dispatch.REFERENCE),
            "xla logits matmul": _runner(lambda h, w: h @ w.T, hidden, head),
        },
    )


def _runner(call: Callable[..., Any], *arguments: Any) -> Runner:
    compiled = jax.jit(call)
    jax.block_until_ready(compiled(*arguments))
    return functools.partial(compiled, *arguments)
