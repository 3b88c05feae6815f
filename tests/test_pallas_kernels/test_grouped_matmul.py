"""Every implementation of the grouped product against float64, case by case."""

from __future__ import annotations

import functools
import importlib.util

import compile_targets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import api, cases
from pallas_kernels.grouped_matmul.cases import Case

#: ragged_dot is refused off TPUs because it is slow there; what it computes is the same.
NAMES = ("tiles", "ragged_dot", "reference")


def run(name: str, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> np.ndarray:
    call = jax.jit(functools.partial(api.grouped_matmul, implementation=name))
    return np.asarray(call(x, weights, sizes).astype(jnp.float32))


def expected(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> np.ndarray:
    rows, matrices = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights))
    out = np.zeros((rows.shape[0], matrices.shape[2]))
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        if size:
            out[start : start + size] = rows[start : start + size] @ matrices[group]
        start += size
    return out


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("tiles", "float32"), ("tiles", "bfloat16"), ("ragged_dot", "float32")),
        ("reference", "float32"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in NAMES[1:]),
    ],
)
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_equals_float64(case: Case, name: str, dtype: str) -> None:
    x, weights, sizes = cases.make_inputs(case, dtype)
    if name == "ragged_dot":
        weights = jnp.nan_to_num(weights)  # on CPUs XLA multiplies every group with zeros
    got, want = run(name, x, weights, sizes), expected(x, weights, sizes)
    scale = np.sqrt(case.in_size) * (float(jnp.finfo(dtype).eps) + 1e-6)
    assert np.max(np.abs(got - want), initial=0.0) <= 4 * scale
    assert not got[case.num_rows :].any()


@pytest.mark.parametrize("name", ["tiles", "reference"])
def test_what_other_rows_hold_makes_no_difference(name: str) -> None:
    x, weights, sizes = cases.make_inputs(cases.SMALL[0])
    before = run(name, x, weights, sizes)
    others = x.at[9:].set(3.0)
    assert run(name, others, weights, sizes)[:9].tobytes() == before[:9].tobytes()


def test_company_makes_no_difference() -> None:
    """Bit for bit: rows alone, and in batches that take other tile sizes."""
    name = "tiles"
    case = Case(name="company", num_rows=260, num_groups=3, in_size=40, out_size=56)
    x, weights, sizes = cases.make_inputs(case)
    together = run(name, x, weights, sizes)
    group = np.repeat(np.arange(3), np.asarray(sizes))
    for row in (0, 7, 130, 259):
        alone = run(name, x[row : row + 1], weights, jnp.asarray(np.arange(3) == group[row]))
        assert alone[0].tobytes() == together[row].tobytes()
    first = int(sizes[0])
    some = run(name, x[: first + 3], weights, jnp.asarray([first, 3, 0]))
    assert some.tobytes() == together[: first + 3].tobytes()


def test_dispatch() -> None:
    def choose(platform: str) -> dispatch.Choice:
        return dispatch.choose("grouped_matmul", platform=platform, dtype="bfloat16")

    assert choose("tpu").implementation == "ragged_dot"
    assert choose("cpu").implementation == "tiles"
    assert "every group for every row" in str(choose("cpu"))
    installed = importlib.util.find_spec("tokamax") is not None
    assert choose("gpu").implementation == ("tokamax" if installed else "tiles")


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="pip install tokamax")
@pytest.mark.parametrize("case", cases.SMALL[:2], ids=lambda case: case.name)
def test_tokamax(case: Case) -> None:
    x, weights, sizes = cases.make_inputs(case)
    weights = jnp.nan_to_num(weights)
    np.testing.assert_allclose(
        run("tokamax", x, weights, sizes), expected(x, weights, sizes), atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((3, 5))}, "differ in D"),
        ({"x": jnp.zeros((3, 4), jnp.bfloat16)}, "x is bfloat16"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, "group_sizes is"),
        ({"weights": jnp.zeros((4, 4))}, "must be"),
    ],
)
def test_contradictions(change: dict[str, jax.Array], message: str) -> None:
    arguments = {
        "x": jnp.zeros((3, 4)),
        "weights": jnp.zeros((2, 4, 6)),
        "group_sizes": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        api.grouped_matmul(**(arguments | change), implementation="tiles")


@pytest.mark.compile
@pytest.mark.parametrize("chip", compile_targets.CHIPS)
@pytest.mark.parametrize("case", cases.FULL, ids=lambda case: case.name)
def test_compiles_for_tpu_without_a_copy_of_the_experts(case: Case, chip: str) -> None:
    with compile_targets.libtpu_loaded():
        mesh = compile_targets.one_chip(compile_targets.CHIPS[chip])
        place = jax.NamedSharding(mesh, jax.P())
        shapes = (
            ((case.num_rows, case.in_size), jnp.bfloat16),
            ((case.num_groups, case.in_size, case.out_size), jnp.bfloat16),
            ((case.num_groups,), jnp.int32),
        )
        arguments = [jax.ShapeDtypeStruct(*each, sharding=place) for each in shapes]
        call = jax.jit(functools.partial(api.grouped_matmul, implementation="ragged_dot"))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        # Float32 results before they are rounded, and what the compiler needs besides.
        most = 3 * 4 * case.num_rows * case.out_size + 16 * compile_targets.MEBIBYTE
        assert compiled.memory_analysis().temp_size_in_bytes <= most
