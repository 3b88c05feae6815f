"""Products with quantised weights compile for TPUs; nothing of a weight is copied or converted.

Compiling is not proof that it is right (the interpreted tests are for that), nor that it is fast.
It shows that blocks and layouts are such as the chips can do. Every weight of every model meets
every scheme; rows and chips take turns, so that each scheme meets each of them often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import compile_targets
import jax
import jax.numpy as jnp
import pytest
from compile_targets import CHIPS, MEBIBYTE

from pallas_kernels.quantized_matmul import cases
from pallas_kernels.quantized_matmul.api import abstract_packed, quantized_matmul, take_rows
from pallas_kernels.quantized_matmul.cases import ROWS, Case
from pallas_kernels.quantized_matmul.quantize import abstract_weight
from pallas_kernels.quantized_matmul.scheme import SCHEMES, QuantizedWeight, Scheme

pytestmark = pytest.mark.compile

BY_NAME = {case.name: case for case in cases.FULL}
PARTS = [(model, part) for model, parts in cases.MODELS.items() for part, *_ in parts]
#: Some of each kind, for continuous integration: (case, scheme, chip).
IN_CI = (
    ("llama-3.1-8b-gate-up-8", "int8_token", "v5e"),
    ("llama-3.1-8b-down-512", "int8_token", "7x"),
    ("llama-3.1-8b-head-1", "int4_group128", "v6e"),
    ("llama-3.1-8b-qkv-128", "int4_group32_zero", "v6e"),
    ("smollm2-head-32", "int8", "v5e"),
    ("smollm2-out-8", "int8_group32_a8", "v5e"),
    ("smollm2-down-1", "int4_group64_zero_a16", "7x"),
    ("gemma-3-270m-down-8", "fp8", "v5e"),
    ("gemma-3-270m-qkv-128", "fp8_token", "7x"),
)


def _calls() -> Iterator[tuple[str, str, str]]:
    chips = list(CHIPS)
    for number, scheme in enumerate(SCHEMES):
        for other, (model, part) in enumerate(PARTS):
            rows, chip = ROWS[(number + other) % len(ROWS)], chips[(2 * number + other) % 3]
            case = BY_NAME[f"{model}-{part}-{rows}"]
            if case.fits(SCHEMES[scheme]):
                yield case.name, scheme, chip


CALLS = [pytest.param(*call, marks=pytest.mark.compile_ci) for call in IN_CI] + [
    pytest.param(*call) for call in _calls() if call not in IN_CI
]


@pytest.fixture(autouse=True, scope="module")
def _libtpu() -> Iterator[None]:
    with compile_targets.libtpu_loaded():
        yield


def compile_case(case: Case, scheme: Scheme, chip: str, dtype: str) -> jax.stages.Compiled:
    mesh = compile_targets.one_chip(CHIPS[chip])
    weight = abstract_packed(case.out_size, case.in_size, scheme, implementation="tpu")
    on_chip = [
        None if leaf is None else compile_targets.on_every_chip(mesh, leaf.shape, leaf.dtype)
        for leaf in weight
    ]
    x = compile_targets.on_every_chip(mesh, (case.rows, case.in_size), jnp.dtype(dtype))

    def call(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_matmul(x, weight, scheme, implementation="tpu")

    return compile_targets.compile_for(mesh, jax.jit(call), x, QuantizedWeight(*on_chip))


def copies_of(compiled: Any, case: Case, scheme: Scheme) -> list[str]:
    """Instructions outside the kernel that make an array as large as one of the weight.

    Scales of whole rows, a few numbers per output, may be copied; so may anything be fetched as
    it is into the fast memory (copy-start).
    """
    weight = abstract_weight(case.out_size, case.in_size, scheme)
    sizes = {leaf.size for leaf in weight[: 1 if scheme.group is None else 2] if leaf is not None}
    sizes.add(case.out_size * case.in_size)
    sizes.discard(max(case.rows, 8) * case.in_size)  # x
    made = re.compile(r"= (s8|u8|f8e4m3fn|u16|f16|f32|bf16|s32)\[([\d,]+)\]\S* ([\w-]+)\(")
    harmless = {"parameter", "bitcast", "copy-done", "get-tuple-element", "custom-call"}
    found = []
    for line in compiled.as_text().splitlines():
        match = made.search(line)
        if match is None or match[3] in harmless:
            continue
        shape = [int(size) for size in match[2].split(",")]
        if case.out_size in shape and math.prod(shape) in sizes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize(("name", "scheme_name", "chip"), CALLS)
def test_compiles_without_a_copy(name: str, scheme_name: str, chip: str) -> None:
    case, scheme = BY_NAME[name], SCHEMES[scheme_name]
    compiled = compile_case(case, scheme, chip, "bfloat16")
    assert copies_of(compiled, case, scheme) == []
    # x in float32, rounded, in planes; with a tile's worth of rows at least.
    most = 16 * max(case.rows, 32) * (case.in_size + case.out_size) + 2 * MEBIBYTE
    assert compiled.memory_analysis().temp_size_in_bytes <= most


@pytest.mark.parametrize("scheme", ["int8", "int4_group32_zero", "int8_group128_a8", "fp8_token"])
@pytest.mark.parametrize("rows", [8, 512])
def test_float32_compiles(scheme: str, rows: int) -> None:
    case = BY_NAME[f"llama-3.1-8b-out-{rows}"]
    assert (
        copies_of(compile_case(case, SCHEMES[scheme], "v6e", "float32"), case, SCHEMES[scheme])
        == []
    )


def test_a_copy_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the other layout than XLA's makes it copy, and the text tells."""
    from pallas_kernels.quantized_matmul import tpu_facts

    right = tpu_facts.is_turned
    monkeypatch.setattr(tpu_facts, "is_turned", lambda *shape: not right(*shape))
    case, scheme = BY_NAME["smollm2-head-8"], SCHEMES["int4_group32"]
    assert len(copies_of(compile_case(case, scheme, "v5e", "bfloat16"), case, scheme)) == 2


@pytest.mark.parametrize(
    ("name", "scheme_name"),
    [("llama-3.1-8b-head-8", "int4_group32_zero"), ("gemma-3-270m-head-8", "int8")],
)
def test_rows_are_taken_without_a_copy(name: str, scheme_name: str) -> None:
    """As the embedding of a model does that shares it with the output head."""
    case, scheme = BY_NAME[name], SCHEMES[scheme_name]
    mesh = compile_targets.one_chip(CHIPS["v5e"])
    packed = abstract_packed(case.out_size, case.in_size, scheme, implementation="tpu")
    weight, ids = jax.tree.map(
        lambda leaf: compile_targets.on_every_chip(mesh, leaf.shape, leaf.dtype),
        (packed, jax.ShapeDtypeStruct((512,), jnp.int32)),
    )
    jitted = jax.jit(lambda *args: take_rows(args[0], scheme, args[1], implementation="tpu"))
    compiled = compile_targets.compile_for(mesh, jitted, weight, ids)
    assert copies_of(compiled, case, scheme) == []
    assert compiled.memory_analysis().temp_size_in_bytes <= 32 * MEBIBYTE
