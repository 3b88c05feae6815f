"""The CPU kernels of quantised products: bit for bit, on any instructions, split, with NaN."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import api, cases, cpu
from pallas_kernels.quantized_matmul.cases import Case
from pallas_kernels.quantized_matmul.cpu_dots import Instructions
from pallas_kernels.quantized_matmul.cpu_handlers import LESSER
from pallas_kernels.quantized_matmul.scheme import SCHEMES, QuantizedWeight, Scheme

pytestmark = pytest.mark.usefixtures("quick_compiler")

#: One scheme per kernel.
KERNELS = ("int8_group32_a16", "int4_group32_zero_a16", "int8", "int4_group64", "fp8")
#: Rows of two widths, more than a block holds, and weights of several runs of panels.
LARGE = Case(name="large", rows=512, out_size=48, in_size=1536)


#: Where the kernels under test come from: installed, or this checkout.
REPOSITORY = pathlib.Path(cpu.__file__).parents[2]
#: Loads the kernels of the schemes named, in that order, and multiplies with each.
PROGRAM = """
import sys
import jax.numpy as jnp
import numpy as np
from pallas_kernels.quantized_matmul import api, cases, cpu
schemes = [api.SCHEMES[name] for name in sys.argv[1:]]
print(*(cpu.load(scheme).from_cache for scheme in schemes))
for scheme in schemes:
    inputs = cases.make_inputs(cases.SMALL[1], scheme)
    weight = cpu.pack(inputs.weight, scheme)
    out = cpu.quantized_matmul(inputs.x, weight, scheme, out_dtype=jnp.float32)
    print(np.asarray(out).tobytes().hex())
"""


def make(case: Case, scheme: Scheme) -> tuple[jax.Array, QuantizedWeight]:
    inputs = cases.make_inputs(case, scheme)
    return inputs.x, cpu.pack(inputs.weight, scheme)


@functools.partial(jax.jit, static_argnums=(2, 3))
def multiply(
    x: jax.Array, weight: QuantizedWeight, scheme: Scheme, instructions: Instructions | None = None
) -> jax.Array:
    return cpu.quantized_matmul(
        x,
        weight,
        scheme,
        out_dtype=jnp.float32,
        instructions=instructions,
    )


@pytest.mark.parametrize("name", [*KERNELS, "int8_token"])
def test_company_makes_no_difference(name: str) -> None:
    """A row has the same bits alone and among any others, at any place."""
    scheme = SCHEMES[name]
    x, weight = make(LARGE, scheme)
    whole = np.asarray(multiply(x, weight, scheme))
    for rows in (1, 2, 3, 5, 8, 13, 64, 300):
        start = {1: 0, 2: 100, 3: 509, 5: 255, 8: 84, 13: 77, 64: 400, 300: 11}[rows]
        part = np.asarray(multiply(x[start : start + rows], weight, scheme))
        assert part.tobytes() == whole[start : start + rows].tobytes(), rows
    for row in (1, 83, 84, 167, 251, 252, 511):
        assert np.asarray(multiply(x[row : row + 1], weight, scheme)).tobytes() == (
            whole[row].tobytes()
        )


@pytest.mark.parametrize("instructions", sorted({"portable", LESSER}))
@pytest.mark.parametrize("name", ["int4_group32_zero_a16", "int8_group32_a8"])
def test_other_instructions_give_the_same_bits(instructions: Instructions, name: str) -> None:
    """What other machines run; with "portable" no instruction is asked for by its name."""
    scheme = SCHEMES[name]
    assert cpu.load(scheme, instructions=instructions).target.endswith(instructions)
    for case in (cases.SMALL[1], cases.SMALL[3], cases.SMALL[5]):
        x, weight = make(case, scheme)
        other = np.asarray(multiply(x, weight, scheme, instructions))
        assert other.tobytes() == np.asarray(multiply(x, weight, scheme)).tobytes()
        assert other.any()


def test_half_precision_scales_are_read_exactly_without_the_instruction() -> None:
    """Down to the smallest float16, which XLA's threads would flush to zero in float arithmetic."""
    scheme = SCHEMES["int4_group32_zero_a16"]
    scales = np.arange(1, 16 * 64 + 1, dtype=np.uint16).reshape(16, 64).view(np.float16)
    scales[:, 32:] = np.linspace(-60000, 60000, 16 * 32).reshape(16, 32)
    values = jnp.zeros((16, 1024), jnp.uint8).at[:, ::16].set(1)  # the first column of each group
    weight = QuantizedWeight(values, jnp.asarray(scales), jnp.zeros((16, 64), jnp.float16))
    x = jnp.zeros((64, 2048)).at[jnp.arange(64), jnp.arange(64) * 32].set(32767.0)
    want = 32767 * scales.astype(np.float64).T
    choices: tuple[Instructions | None, ...] = ("portable", None)
    for instructions in choices:
        got = np.asarray(multiply(x, cpu.pack(weight, scheme), scheme, instructions))
        np.testing.assert_allclose(got, want, 1e-6)


def test_every_fp8_number_is_read_exactly() -> None:
    """Among them those below 2**-6, which have no hidden bit."""
    scheme = SCHEMES["fp8"]
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], np.uint8)
    values = jax.lax.bitcast_convert_type(jnp.asarray(np.tile(bits, (16, 1))), jnp.float8_e4m3fn)
    weight = QuantizedWeight(values, jnp.ones((16, 1), jnp.float32), None)
    got = multiply(jnp.eye(256), cpu.pack(weight, scheme), scheme)
    np.testing.assert_array_equal(got[:, 3], values[3].astype(jnp.float32))


def test_the_largest_sums_fit() -> None:
    """Every product at its largest: int8 with int16 over 512 columns, and per row of x."""
    grouped = Scheme(name="int8_group512_a16", values="int8", group=512, activations="int16_group")
    for scheme, in_size in ((grouped, 512), (SCHEMES["int8_token"], 16384)):
        weight = api.quantize(np.full((16, in_size), -1.0, np.float32), scheme)
        x = jnp.ones((7, in_size))
        got = multiply(x, cpu.pack(weight, scheme), scheme)
        np.testing.assert_allclose(got, -in_size, 1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, np.nan) for name in (*KERNELS, "fp8_token")),
        *((name, np.inf) for name in ("int4_group32_zero_a16", "int8_token")),
    ],
)
def test_values_that_are_not_numbers_stay_visible_and_at_home(name: str, value: float) -> None:
    scheme = SCHEMES[name]
    x, weight = make(cases.SMALL[3], scheme)
    whole = np.asarray(multiply(x, weight, scheme))
    broken = np.asarray(multiply(x.at[4, 200].set(value), weight, scheme))
    rows = np.arange(len(x)) != 4
    assert broken[rows].tobytes() == whole[rows].tobytes()
    zero_row = np.arange(weight.scales.shape[0]) == weight.scales.shape[0] // 2
    assert not np.isfinite(broken[4][~zero_row]).any()


def test_tiny_and_zero_rows() -> None:
    scheme = SCHEMES["int8_group32_a16"]
    x, weight = make(cases.SMALL[3], scheme)
    x = x.at[0].set(0).at[1].multiply(1e-36).at[2].multiply(1e30)
    got = np.asarray(multiply(x, weight, scheme))
    assert not got[:2].any()
    assert np.isfinite(got).all()


def test_no_rows() -> None:
    for name in ("int8_group32_a16", "int4_group64"):
        _, weight = make(cases.SMALL[2], SCHEMES[name])
        assert multiply(jnp.zeros((0, 128)), weight, SCHEMES[name]).shape == (0, 64)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", ["int4_group32_zero_a16", "int8"])
def test_outputs_split_over_devices(name: str, parts: int) -> None:
    """Under shard_map each device packs its own rows, and they call at the same time."""
    scheme = SCHEMES[name]
    inputs = cases.make_inputs(Case(name="split", rows=40, out_size=192, in_size=256), scheme)
    devices = np.array(jax.devices()[:parts], dtype=object)
    mesh = jax.sharding.Mesh(devices, ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, none = jax.P("tensor"), jax.P()
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    weight = jax.device_put(inputs.weight, jax.NamedSharding(mesh, rows))
    packed = jax.jit(split(lambda w: cpu.pack(w, scheme), in_specs=rows, out_specs=rows))(weight)
    call = jax.jit(
        split(
            lambda x, w: cpu.quantized_matmul(x, w, scheme, out_dtype=jnp.float32),
            in_specs=(none, rows),
            out_specs=jax.P(None, "tensor"),
        )
    )
    want = np.asarray(multiply(inputs.x, cpu.pack(inputs.weight, scheme), scheme))
    for _ in range(20):
        assert np.asarray(call(inputs.x, packed)).tobytes() == want.tobytes()


def test_packed_weights_can_be_put_together() -> None:
    """Query, key and value become one product: panels stand one after the other."""
    scheme = SCHEMES["int4_group32_zero_a16"]
    x, first = make(Case(name="q", rows=3, out_size=64, in_size=96), scheme)
    _, second = make(Case(name="k", rows=3, out_size=16, in_size=96), scheme)
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, second)
    apart = [np.asarray(multiply(x, weight, scheme)) for weight in (first, second)]
    assert np.asarray(multiply(x, both, scheme)).tobytes() == np.hstack(apart).tobytes()


def test_another_process_finds_the_kernels_on_disk() -> None:
    """In another order of loading; with the same numbers as here."""
    names = ("int8_group32_a16", "int4_group32_zero_a16")
    want = []
    for name in names:
        scheme = SCHEMES[name]
        assert cpu.load(scheme).folder is not None
        want.append(np.asarray(multiply(*make(cases.SMALL[1], scheme), scheme)).tobytes().hex())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *reversed(names)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", *reversed(want)]
