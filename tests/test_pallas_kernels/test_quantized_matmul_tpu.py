"""The TPU kernels of quantized_matmul, interpreted on the CPU, against the definition.

Blocks are small, so that every call has several of each kind, and the last ones hang over the end
of the weight: what is there is NaN where the dtype has it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul import api, tpu, tpu_kernels
from pallas_kernels.quantized_matmul.cases import Inputs
from pallas_kernels.quantized_matmul.quantize import dequantize, round_fp8, round_integers
from pallas_kernels.quantized_matmul.scheme import LARGEST, SCHEMES, QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.tpu import quantized_matmul
from pallas_kernels.quantized_matmul.tpu_blocks import Blocks, Way
from pallas_kernels.quantized_matmul.tpu_facts import is_turned
from pallas_kernels.quantized_matmul.tpu_numbers import float16_bits, planes_of, to_float32

#: Copies happen when they are waited for; reads outside of a buffer raise.
SIMULATOR = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
#: XLA's quickest compilation: these programs run for milliseconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Of the sum of |x| |weight|: what adding in another order may change.
EXACT = 3e-6
#: With weights of 17 bits.
SHORT = 2.0**-16
OTHER_SCHEMES = {
    "int4-whole-rows": Scheme(name="int4-whole-rows", values="int4", zeros=True),
    "int4-whole-rows-a8": Scheme(
        name="int4-whole-rows-a8", values="int4", activations="int8_token"
    ),
    "fp8-group48": Scheme(
        name="fp8-group48", values="float8_e4m3fn", group=48, activations="fp8_token"
    ),
    "int8-group256": Scheme(
        name="int8-group256", values="int8", group=256, activations="int8_token"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A product: [rows, out, in] sizes, and blocks of (rows, outputs, columns)."""

    scheme: str
    sizes: tuple[int, int, int]
    blocks: tuple[int, int, int]
    way: Way = "end"
    dtype: str = "bfloat16"
    simulated: bool = False
    within: float = EXACT

    @property
    def full_scheme(self) -> Scheme:
        return (SCHEMES | OTHER_SCHEMES)[self.scheme]

    @functools.cached_property
    def run(self) -> Any:
        """The product as a compiled function of x and the weight."""
        rows, outputs, columns = self.blocks
        call = functools.partial(
            quantized_matmul,
            scheme=self.full_scheme,
            out_dtype=jnp.float32,
            blocks=Blocks(way=self.way, rows=rows, outputs=outputs, columns=columns),
            interpret=SIMULATOR if self.simulated else True,
        )
        return jax.jit(lambda x, weight: call(x, weight), compiler_options=QUICK)

    def inputs(self, seed: int = 0) -> Inputs:
        """Any numbers a weight may be stored as, the smallest scales of float16 among them."""
        rows, out_size, in_size = self.sizes
        scheme, rng = self.full_scheme, np.random.default_rng(seed)
        x = rng.standard_normal((rows, in_size), np.float32)
        x[:, ::8] *= 10
        shape = scheme.values_shape(out_size, in_size)
        if scheme.values == "int4":
            values = rng.integers(0, 256, shape).astype(np.uint8)
        else:
            largest = LARGEST[scheme.values]
            values = rng.uniform(-largest, largest, shape).astype(scheme.values_dtype)
        groups = (out_size, scheme.num_groups(in_size))
        scales = np.exp(2 * rng.standard_normal(groups)) * 3e-4 * rng.choice([-1, 1], groups)
        zeros = rng.uniform(0, 15, groups).astype(scheme.scale_dtype)
        weight = QuantizedWeight(
            jnp.asarray(values),
            jnp.asarray(scales.astype(scheme.scale_dtype)),
            jnp.asarray(zeros) if scheme.zeros else None,
        )
        return Inputs(x=jnp.asarray(x, self.dtype), weight=weight)


CALLS = {
    "int8": Call(scheme="int8", sizes=(3, 300, 256), blocks=(8, 128, 128)),
    "int8-turned": Call(scheme="int8", sizes=(3, 300, 96), blocks=(8, 128, 96), simulated=True),
    "int8-float32": Call(
        scheme="int8", sizes=(40, 37, 256), blocks=(32, 37, 128), dtype="float32", simulated=True
    ),
    "int8-token": Call(scheme="int8_token", sizes=(70, 160, 256), blocks=(32, 128, 128)),
    "fp8": Call(scheme="fp8", sizes=(9, 200, 64), blocks=(16, 128, 64), simulated=True),
    "fp8-token": Call(scheme="fp8_token", sizes=(9, 160, 256), blocks=(16, 128, 128)),
    "int4-whole-rows": Call(
        scheme="int4-whole-rows", sizes=(5, 200, 512), blocks=(8, 128, 128)
    ),
    "int4-whole-rows-a8": Call(
        scheme="int4-whole-rows-a8", sizes=(5, 200, 512), blocks=(8, 128, 128)
    ),
    "sums": Call(
        scheme="int4_group32", way="sums", sizes=(5, 300, 1024), blocks=(8, 128, 256)
    ),
    "sums-turned": Call(
        scheme="int4_group64_zero", way="sums", sizes=(40, 300, 576), blocks=(32, 128, 288)
    ),
    "sums-scales-turned-here": Call(
        scheme="int8_group32", way="sums", sizes=(3, 160, 3200), blocks=(8, 128, 640)
    ),
    "sums-simulated": Call(
        scheme="int4_group128_zero_a8",
        way="sums",
        sizes=(40, 160, 512),
        blocks=(32, 128, 128),
        dtype="float32",
        simulated=True,
    ),
    "sums-float32": Call(
        scheme="int8_group64", way="sums", sizes=(9, 64, 256), blocks=(16, 64, 128), dtype="float32"
    ),
    "sums-a16": Call(
        scheme="int8_group64_a16", way="sums", sizes=(9, 160, 512), blocks=(16, 128, 256)
    ),
    "sums-odd-groups": Call(
        scheme="fp8-group48", way="sums", sizes=(3, 64, 288), blocks=(8, 64, 288)
    ),
    "sums-wide-groups": Call(
        scheme="int8-group256", way="sums", sizes=(3, 64, 1024), blocks=(8, 64, 512)
    ),
    "weights": Call(
        scheme="int8_group32", way="weights", sizes=(70, 160, 1024), blocks=(32, 128, 512),
        within=SHORT,
    ),
    "weights-turned": Call(
        scheme="int4_group64_zero", way="weights", sizes=(40, 200, 576), blocks=(32, 128, 288),
        within=SHORT, simulated=True,
    ),
    "weights-float32": Call(
        scheme="int4_group32_zero", way="weights", sizes=(9, 160, 1024), blocks=(16, 128, 256),
        dtype="float32",
    ),
    "weights-a8": Call(
        scheme="int8_group32_a8", way="weights", sizes=(40, 64, 512), blocks=(32, 64, 256),
        within=2 * SHORT,
    ),
}  # fmt: skip
#: What the default run leaves out: other mixtures of what it has.
SLOW = {
    *("int8-float32", "fp8-token", "int4-whole-rows-a8", "sums-float32", "sums-wide-groups"),
    *("sums-odd-groups", "weights-float32", "weights-a8", "int8"),
}
#: A small product, for what is the same for all.
SMALL = Call(scheme="int4_group64_zero", way="sums", sizes=(5, 300, 256), blocks=(8, 128, 128))
#: One of each way, for what must hold for all.
ONE_EACH = ("int8-token", "sums", "weights")


def worst(call: Call, got: np.ndarray, inputs: Inputs) -> float:
    """The largest difference to the definition, as a part of the sum of |x| |weight|."""
    scheme = call.full_scheme
    x = np.asarray(inputs.x, np.float32)
    groups = x.reshape(len(x), scheme.num_groups(x.shape[1]), -1)
    match scheme.activations:
        case "fp8_token":
            values, scales = round_fp8(x)
        case "int8_token":
            values, scales = round_integers(x, "int8")
        case "int8_group" | "int16_group":
            values, scales = round_integers(groups, scheme.activations.removesuffix("_group"))
        case _:
            values, scales = x, np.ones(len(x), np.float32)
    used = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[..., None]
    weight = np.asarray(dequantize(inputs.weight, scheme), np.float64)
    want, size = (side(used.reshape(x.shape)) @ side(weight).T for side in (np.asarray, np.abs))
    assert got.shape == want.shape
    return float(np.max(np.abs(got - want) / np.maximum(size, 1e-30)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CALLS],
)
def test_equals_the_definition(name: str) -> None:
    call = CALLS[name]
    inputs = call.inputs()
    assert worst(call, np.asarray(call.run(inputs.x, inputs.weight)), inputs) <= call.within


def test_the_calls_are_of_every_kind() -> None:
    """Both layouts of values and of scales, several blocks of each kind, some hanging over."""
    kinds = set()
    for call in CALLS.values():
        _, out_size, in_size = call.sizes
        scheme = call.full_scheme
        columns = scheme.values_shape(out_size, in_size)[1]
        groups = scheme.num_groups(in_size)
        kinds.add((call.way, "values turned", is_turned(out_size, columns)))
        if groups > 1:
            kinds.add(("scales turned", is_turned(out_size, groups)))
        kinds.add((call.way, "blocks of columns", columns > call.blocks[2]))
        kinds.add((call.way, "blocks of rows", call.sizes[0] > call.blocks[0]))
        kinds.add((call.way, "hangs over", out_size % call.blocks[1] > 0))
    whats = ("values turned", "blocks of columns", "blocks of rows", "hangs over")
    wanted = {(way, what, yes) for way in tpu.KERNELS for what in whats for yes in (True, False)}
    wanted |= {("scales turned", True), ("scales turned", False)}
    assert wanted <= kinds


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_row_depends_on_no_other_row(name: str) -> None:
    call = CALLS[name]
    inputs, others = call.inputs(), call.inputs(seed=1)
    kept = np.arange(call.sizes[0]) % 3 == 1
    mixed = jnp.where(kept[:, None], inputs.x, others.x * 100).at[0].set(jnp.nan)
    mixed = mixed.at[2, 5].set(-jnp.inf)
    alone = np.asarray(call.run(inputs.x, inputs.weight))
    together = np.asarray(call.run(mixed, inputs.weight))
    np.testing.assert_array_equal(together[kept], alone[kept])
    assert not np.isfinite(together[[0, 2]]).any()
    assert np.isfinite(together[3:]).all()


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_any_number_of_rows(rows: int) -> None:
    call = dataclasses.replace(CALLS["int8"], sizes=(rows, 64, 128))
    inputs = call.inputs()
    out = quantized_matmul(
        inputs.x, inputs.weight, call.full_scheme, out_dtype=jnp.bfloat16, interpret=True
    )
    assert (out.shape, out.dtype) == ((rows, 64), jnp.bfloat16)
    if rows:
        assert worst(call, np.asarray(out, np.float32), inputs) <= 2.0**-8


def faulty(call: Call, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> float:
    """How wrong a call is where a function of the kernels is another one."""
    module = tpu if hasattr(tpu, name) else tpu_kernels
    monkeypatch.setattr(module, name, functools.partial(wrong, getattr(module, name)))
    broken = dataclasses.replace(call)
    inputs = broken.inputs()
    return worst(broken, np.asarray(broken.run(inputs.x, inputs.weight)), inputs)


def next_group(right: Any, plan: Any, refs: Any, first: Any, count: int) -> Any:
    """Scales of the groups one further on."""
    found = right(plan, refs, first, count)
    return pl.ds(jnp.minimum(found.start + 1, plan.facts.num_groups - count), count)


def same_block(right: Any, stored: Any, block: Any, turned: bool) -> Any:
    """The first block of columns instead of each."""
    if turned:
        return right(stored, block, turned)
    return stored, pl.BlockSpec(block, lambda m, n, k: (n, 0))


def next_columns(right: Any, plan: Any, refs: Any, start: Any, size: int) -> Any:
    """Columns of x of the block before."""
    return pl.ds(jnp.maximum(right(plan, refs, start, size).start - plan.blocks.columns, 0), size)


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("sums", "_groups", next_group),
        ("weights", "_groups", next_group),
        ("int8", "_weight_operand", same_block),
        ("sums", "_weight_operand", same_block),
        ("int8-token", "_x_columns", next_columns),
    ],
)
def test_planted_faults_are_seen(
    name: str, function: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faulty(CALLS[name], monkeypatch, function, wrong) > 100 * CALLS[name].within


def test_all_float16_numbers_are_read_exactly() -> None:
    """Those below the smallest normal one too; infinity and NaN are NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    want = bits.view(np.float16).astype(np.float32)
    got = np.asarray(to_float32(float16_bits(jnp.asarray(bits.view(np.float16)))))
    np.testing.assert_array_equal(got, np.where(np.isfinite(want), want, np.nan))


def test_planes_hold_every_bit() -> None:
    x = np.random.default_rng(0).standard_normal(1000, np.float32) * np.float32(1e3)
    planes = jax.jit(lambda x: planes_of(x, 3))(x)
    assert all(plane.dtype == jnp.bfloat16 for plane in planes)
    np.testing.assert_array_equal(sum(np.asarray(plane, np.float64) for plane in planes), x)


def test_a_packed_weight_gives_the_same() -> None:
    call = SMALL
    inputs, scheme = call.inputs(), call.full_scheme
    packed = api.pack(inputs.weight, scheme, implementation="tpu")
    _, out_size, in_size = call.sizes
    abstract = api.abstract_packed(out_size, in_size, scheme, implementation="tpu")
    assert jax.tree.map(lambda leaf: leaf.dtype, packed) == jax.tree.map(
        lambda leaf: leaf.dtype, abstract
    )
    assert packed.scales.dtype == jnp.uint16
    np.testing.assert_array_equal(call.run(inputs.x, packed), call.run(inputs.x, inputs.weight))
    ids = jnp.array([7, 0, 299])
    np.testing.assert_array_equal(
        api.take_rows(packed, scheme, ids, implementation="tpu"),
        dequantize(inputs.weight, scheme)[ids],
    )


def test_scales_may_be_float32() -> None:
    call = SMALL
    inputs = call.inputs()
    values, scales, zeros = inputs.weight
    assert zeros is not None
    wide = QuantizedWeight(values, scales.astype(jnp.float32), zeros.astype(jnp.float32))
    np.testing.assert_array_equal(call.run(inputs.x, wide), call.run(inputs.x, inputs.weight))
