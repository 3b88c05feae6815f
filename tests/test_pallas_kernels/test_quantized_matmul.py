"""Schemes, rounding, and every implementation that runs here against float64, case by case."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul import api, cases
from pallas_kernels.quantized_matmul.cases import Case, Inputs
from pallas_kernels.quantized_matmul.quantize import round_fp8, round_integers
from pallas_kernels.quantized_matmul.scheme import SCHEMES, QuantizedWeight, Scheme

pytestmark = pytest.mark.usefixtures("quick_compiler")

NAMES = ("cpu", "reference")
#: One scheme per kernel on CPUs.
KERNELS = ("int8_group32_a16", "int4_group32_zero_a16", "int8", "int4_group32", "fp8")
BY_NAME = {case.name: case for case in (*cases.SMALL, *cases.ODD)}
ONE_CASE = BY_NAME["rows-13"]
SEVERAL = tuple(BY_NAME[name] for name in ("decode", "chunk", "long-rows"))


#: What the definition is run with: each way of rounding, each kind of values.
DEFINED = (*KERNELS, "int8_token", "fp8_token", "int4_group64_a8", "int4_group128_zero")


def cases_of(name: str, implementation: str) -> tuple[Case, ...]:
    """Integer kernels meet every case, others on CPUs several, the rest one."""
    if implementation == "reference":
        return (ONE_CASE,) if name in DEFINED else ()
    if name not in KERNELS:
        return (ONE_CASE,)
    return cases.SMALL if name in KERNELS[:2] else SEVERAL


CALLS = [
    (case, name, implementation)
    for name in SCHEMES
    for implementation in NAMES
    for case in cases_of(name, implementation)
]


def run(
    inputs: Inputs, scheme: Scheme, implementation: str, out_dtype: str | None = None
) -> np.ndarray:
    """The product, as float32."""
    weight = api.pack(inputs.weight, scheme, implementation=implementation)
    out = jax.jit(
        lambda x, weight: api.quantized_matmul(
            x, weight, scheme, out_dtype=out_dtype, implementation=implementation
        )
    )(inputs.x, weight)
    assert out.dtype == (out_dtype or inputs.x.dtype)
    return np.asarray(out, np.float32)


def weight_of(weight: QuantizedWeight, scheme: Scheme) -> np.ndarray:
    """The weight in float64, from its stored numbers."""
    values = np.asarray(weight.values)
    if scheme.values == "int4":
        whole = np.zeros((values.shape[0], 2 * values.shape[1]))
        whole[:, 0::2], whole[:, 1::2] = values % 16, values // 16
    else:
        whole = values.astype(np.float64)
    zero = 8.0 if scheme.values == "int4" else 0.0
    groups = weight.scales.shape[1]
    parts = whole.reshape(len(whole), groups, whole.shape[1] // groups)
    zeros = np.full((len(whole), groups), zero) if weight.zeros is None else weight.zeros
    scales = np.asarray(weight.scales, np.float64)
    return ((parts - np.asarray(zeros, np.float64)[..., None]) * scales[..., None]).reshape(
        whole.shape
    )


def activations_of(x: jax.Array, scheme: Scheme) -> np.ndarray:
    """What the product uses for x, in float64."""
    given = np.asarray(x, np.float32)
    if scheme.activations == "float":
        return given.astype(np.float64)
    kind, per = scheme.activations.split("_")
    group = given.shape[1] if per == "token" else scheme.group_size(given.shape[1])
    top = np.float32({"int8": 127, "int16": 32767, "fp8": 448}[kind])
    parts = given.reshape(len(given), given.shape[1] // group, group)
    largest = np.abs(parts).max(-1, keepdims=True)
    scaled = parts * (top / largest)
    rounded = scaled.astype(ml_dtypes.float8_e4m3fn) if kind == "fp8" else np.rint(scaled)
    return (rounded.astype(np.float64) * (largest / top).astype(np.float64)).reshape(given.shape)


def assert_close(got: np.ndarray, inputs: Inputs, scheme: Scheme, dtype: str = "float32") -> None:
    """Within the rounding of the result and of float32 sums over K."""
    x, weight = activations_of(inputs.x, scheme), weight_of(inputs.weight, scheme)
    want, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if scheme.values == "int4":  # zero points are taken off sums, not off every weight
        scales = np.abs(np.asarray(inputs.weight.scales, np.float64))
        shape = (len(x), scales.shape[1], x.shape[1] // scales.shape[1])
        groups = np.abs(x).reshape(shape).sum(-1)
        size = size + 15 * groups @ scales.T
    sums = 6e-8 * (6 + np.sqrt(x.shape[1]) / 4)
    limit = float(jnp.finfo(dtype).eps) * np.abs(want) + sums * size + 1e-30
    assert got.shape == want.shape
    worst = np.max(np.abs(got - want) / limit, initial=0.0)
    assert worst <= 1.0, f"{worst:.2f} times the tolerance"


@pytest.mark.parametrize(
    ("case", "name", "implementation"), CALLS, ids=[f"{c.name}-{n}-{i}" for c, n, i in CALLS]
)
def test_equals_float64(case: Case, name: str, implementation: str) -> None:
    scheme = SCHEMES[name]
    inputs = cases.make_inputs(case, scheme)
    assert_close(run(inputs, scheme, implementation), inputs, scheme)


@pytest.mark.parametrize("name", ["int8_group32_a8", "int4_group32_zero", "int8_token"])
@pytest.mark.parametrize("case", cases.ODD, ids=[case.name for case in cases.ODD])
def test_the_definition_has_no_favourite_sizes(case: Case, name: str) -> None:
    scheme = SCHEMES[name]
    if not case.fits(scheme):
        scheme = dataclasses.replace(scheme, group=2)
    inputs = cases.make_inputs(case, scheme)
    assert_close(run(inputs, scheme, "reference"), inputs, scheme)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", ["int4_group64_zero_a16", "fp8_token"])
def test_other_dtypes(name: str, implementation: str) -> None:
    scheme = SCHEMES[name]
    inputs = cases.make_inputs(ONE_CASE, scheme, dtype=jnp.bfloat16)
    assert_close(run(inputs, scheme, implementation), inputs, scheme, "bfloat16")
    assert_close(run(inputs, scheme, implementation, "float32"), inputs, scheme)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8_group32_a16", "int4_group32_zero_a16"])
def test_other_scales(name: str, scale_dtype: str, implementation: str) -> None:
    scheme = dataclasses.replace(SCHEMES[name], scale_dtype=scale_dtype)
    inputs = cases.make_inputs(BY_NAME["chunk"], scheme)
    assert inputs.weight.scales.dtype == scale_dtype
    assert_close(run(inputs, scheme, implementation), inputs, scheme)


def swap_nibbles(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._replace(values=(weight.values >> 4) | (weight.values << 4))


def neighbours_scale(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._replace(scales=jnp.roll(weight.scales, 1, axis=1))


def no_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    assert weight.zeros is not None
    return weight._replace(zeros=jnp.full_like(weight.zeros, 8))


def last_column_lost(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._replace(values=weight.values.at[:, -1].set(0))


def neighbours_row(weight: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), weight)


FAULTS = [swap_nibbles, neighbours_scale, no_zeros, last_column_lost, neighbours_row]


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_found(
    plant: Callable[[QuantizedWeight], QuantizedWeight], implementation: str
) -> None:
    scheme = SCHEMES["int4_group32_zero_a16"]
    inputs = cases.make_inputs(ONE_CASE, scheme)
    got = run(Inputs(x=inputs.x, weight=plant(inputs.weight)), scheme, implementation)
    with pytest.raises(AssertionError, match="times the tolerance"):
        assert_close(got, inputs, scheme)


def test_coarser_activations_are_found() -> None:
    """int8 where int16 is meant is no rounding error."""
    coarse, fine = SCHEMES["int8_group32_a8"], SCHEMES["int8_group32_a16"]
    inputs = cases.make_inputs(ONE_CASE, fine)
    for implementation in NAMES:
        with pytest.raises(AssertionError, match="times the tolerance"):
            assert_close(run(inputs, coarse, implementation), inputs, fine)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "cpu") for name in KERNELS), ("int4_group32_zero_a16", "reference")],
)
def test_rows_for_an_embedding(name: str, implementation: str) -> None:
    scheme = SCHEMES[name]
    weight = cases.make_inputs(BY_NAME["chunk"], scheme).weight
    packed = api.pack(weight, scheme, implementation=implementation)
    ids = jnp.array([0, 79, 16, 15, 41, 500, -3], jnp.int32)
    rows = api.take_rows(packed, scheme, ids, implementation=implementation)
    want = api.dequantize(weight, scheme)[jnp.array([0, 79, 16, 15, 41, 79, 0])]
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_allclose(want, weight_of(weight, scheme)[[0, 79, 16, 15, 41, 79, 0]], 1e-6)


@pytest.mark.parametrize(
    "name", [name for name, scheme in SCHEMES.items() if scheme.activations == "float"]
)
def test_a_weight_is_close_to_what_it_was(name: str) -> None:
    scheme = SCHEMES[name]
    rng = np.random.default_rng(1)
    given = rng.standard_normal((24, 256), np.float32) * np.float32(0.1)
    given[5] = 0
    given[6, 128:] = 0
    given[7] *= 1e-38  # not even a scale is left
    weight = api.quantize(given, scheme)
    found = np.asarray(api.dequantize(weight, scheme))
    assert not found[5].any()
    assert not found[6, 128:].any()
    assert not found[7].any()
    group = scheme.group_size(256)
    largest = np.abs(given).reshape(24, -1, group).max(-1).repeat(group, 1)
    if scheme.values == "float8_e4m3fn":
        limit = np.maximum(np.abs(given) / 16, largest / 448 / 512) * 1.01
    else:
        # Half a step; with 16 levels and no zero points the far end may be a whole step away.
        steps = {"int8": 254, "int4": 15 if scheme.zeros else 8}[scheme.values]
        limit = largest * (2.1 if scheme.zeros else 1.01) / steps
    assert np.all(np.abs(found - given) <= limit + 1e-36)
    assert abs(float(np.mean(found - given))) < 3e-3


def test_rounding_is_to_even() -> None:
    given = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], np.float32)
    weight = api.quantize(given, SCHEMES["int8"])
    assert weight.values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 4]]
    assert weight.scales.tolist() == [[1.0]]


def test_what_was_quantised_in_a_file_stays_as_it_was() -> None:
    """Blocks as GGUF has them: Q8_0 and Q4_0 exactly; Q4_1 where zero points are float32."""
    rng = np.random.default_rng(2)
    scales = rng.uniform(1e-3, 1e-2, (16, 4)).astype(np.float16).astype(np.float32)[..., None]
    codes = rng.integers(-127, 128, (16, 4, 32))
    codes[..., 3] = 127
    q8_0 = (codes * scales).astype(np.float32).reshape(16, 128)
    np.testing.assert_array_equal(
        api.dequantize(api.quantize(q8_0, SCHEMES["int8_group32"]), SCHEMES["int8_group32"]), q8_0
    )
    codes = rng.integers(-7, 8, (16, 4, 32))
    codes[..., 9] = -8
    q4_0 = (codes * scales).astype(np.float32).reshape(16, 128)
    np.testing.assert_array_equal(
        api.dequantize(api.quantize(q4_0, SCHEMES["int4_group32"]), SCHEMES["int4_group32"]), q4_0
    )
    codes = rng.integers(0, 16, (16, 4, 32))
    codes[..., 0], codes[..., 31] = 0, 15
    lowest = -7.3 * scales
    q4_1 = (codes * scales + lowest).astype(np.float32).reshape(16, 128)
    for scale_dtype, limit in (("float32", 3e-6), ("float16", 1e-2)):
        scheme = dataclasses.replace(SCHEMES["int4_group32_zero"], scale_dtype=scale_dtype)
        error = np.abs(api.dequantize(api.quantize(q4_1, scheme), scheme) - q4_1)
        assert (error <= limit * scales.repeat(32, -1).reshape(16, 128)).all(), scale_dtype


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_is_rounded_the_same_alone(compiled: bool) -> None:
    """Bit for bit, activations and weights, where a single scale is all there is, too."""
    x = np.random.default_rng(3).standard_normal((16, 64), np.float32)
    for make in (round_fp8, functools.partial(round_integers, dtype="int8")):
        call = jax.jit(make) if compiled else make
        values, scales = call(x)
        for row in range(len(x)):
            alone, scale = call(x[row : row + 1])
            assert np.asarray(alone)[0].tobytes() == np.asarray(values)[row].tobytes()
            assert np.asarray(scale)[0].tobytes() == np.asarray(scales)[row].tobytes()
    whole = np.asarray(api.quantize(x, SCHEMES["fp8"]).scales)
    each = [api.quantize(x[row : row + 1], SCHEMES["fp8"]).scales for row in range(len(x))]
    assert np.concatenate(each).tobytes() == whole.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    given = np.ones((16, 64), np.float32)
    given[3, 7] = value
    for scheme in (SCHEMES["int8"], SCHEMES["int4_group32_zero"], SCHEMES["fp8"]):
        with pytest.raises(KernelError, match="NaN or infinity"):
            api.quantize(given, scheme)


def test_scales_that_do_not_fit_are_refused() -> None:
    given = np.full((16, 64), 1e30, np.float32)
    with pytest.raises(KernelError, match="too large for scales of float16"):
        api.quantize(given, SCHEMES["int8_group32"])
    assert np.isfinite(np.asarray(api.quantize(given, SCHEMES["int8"]).scales)).all()


@pytest.mark.parametrize(
    ("shape", "name", "message"),
    [
        ((16, 48), "int8_group32", "rows of 48 weights are not made of groups of 32"),
        ((16,), "int8", r"is \[N, K\], not \(16,\)"),
        ((16, 0), "int8", "rows of 0 weights"),
    ],
)
def test_shapes_that_a_scheme_cannot_hold(shape: tuple[int, ...], name: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        api.quantize(np.ones(shape, np.float32), SCHEMES[name])


def test_names_of_schemes() -> None:
    assert api.named_scheme("int4_group32_zero_a16").activations == "int16_group"
    with pytest.raises(KernelError, match="there is no quantisation 'int3'; use int8, "):
        api.named_scheme("int3")
    assert all(scheme.name == name for name, scheme in SCHEMES.items())


def test_bytes_per_weight() -> None:
    assert SCHEMES["int8"].bytes_per_weight(512) == 1 + 4 / 512
    assert SCHEMES["int8_group32_a16"].bytes_per_weight(576) == 1.0625
    assert SCHEMES["int4_group32_zero"].bytes_per_weight(576) == 0.625
    weight = api.quantize(np.ones((32, 64), np.float32), SCHEMES["int4_group32_zero"])
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    assert total == 32 * 64 * 0.625
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weight) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype),
        api.abstract_weight(32, 64, SCHEMES["int4_group32_zero"]),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w._replace(values=w.values[:, :-1]), r"values are uint8 \(48, 127\), not"),
        (lambda w: w._replace(values=w.values.astype(jnp.int8)), "values are int8"),
        (lambda w: w._replace(scales=w.scales[:, :-1]), "scales are"),
        (lambda w: w._replace(scales=w.scales.astype(jnp.bfloat16)), "scales are bfloat16"),
        (lambda w: w._replace(zeros=None), "zeros are missing"),
    ],
)
def test_weights_that_contradict_the_scheme(
    change: Callable[[QuantizedWeight], QuantizedWeight], message: str
) -> None:
    scheme = SCHEMES["int4_group32_zero"]
    inputs = cases.make_inputs(ONE_CASE, scheme)
    with pytest.raises(ValueError, match=message):
        api.quantized_matmul(inputs.x, change(inputs.weight), scheme, implementation="cpu")
    with pytest.raises(ValueError, match="zeros are not in the scheme"):
        api.quantized_matmul(
            inputs.x, inputs.weight, SCHEMES["int4_group32"], implementation="reference"
        )


def choose(platform: str = "cpu", **changes: object) -> dispatch.Choice:
    facts: dict[str, object] = {
        "dtype": "float32",
        "scheme": SCHEMES["int8_group32_a16"],
        "out_size": 576,
        "in_size": 1536,
    }
    return dispatch.choose("quantized_matmul", platform=platform, **facts | changes)


def test_choice() -> None:
    assert choose().implementation == "cpu"
    assert "cpu" in choose("cuda").refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out_size": 331}, "331 outputs are no multiple of 16"),
        ({"dtype": "float64"}, "x of float64"),
        (
            {"scheme": dataclasses.replace(SCHEMES["int8_group32"], group=16)},
            "groups of 16 inputs are no multiple of 32",
        ),
        ({"scheme": SCHEMES["int8"], "in_size": 80}, "groups of 80 inputs"),
    ],
)
def test_reasons_against_the_cpu_kernel(changes: dict[str, object], reason: str) -> None:
    choice = choose(**changes)
    assert choice.implementation == "reference"
    assert any(reason in text for text in choice.refused["cpu"])


def test_nothing_can_do_groups_that_do_not_fill_rows() -> None:
    with pytest.raises(KernelError, match="groups of 32 do not fill rows of 40"):
        choose(in_size=40)
    with pytest.raises(KernelError, match="x of int32 is not floating-point"):
        choose(dtype="int32")
