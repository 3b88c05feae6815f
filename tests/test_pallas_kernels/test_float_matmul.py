"""Rows times a float32 matrix against float64, case by case, and what a row's result depends on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.float_matmul import cases, cpu
from pallas_kernels.float_matmul.api import float_matmul
from pallas_kernels.float_matmul.cases import Case

NAMES = dispatch.IMPLEMENTATIONS["float_matmul"]


def make_inputs(case: Case) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(case.rows)
    shapes = (case.rows, case.in_size), (case.out_size, case.in_size)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return x, weight


def multiply(name: str, x: jax.Array, weight: jax.Array) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(float_matmul, implementation=name))(x, weight))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", cases.SMALL, ids=[case.name for case in cases.SMALL])
def test_equals_the_product_in_float64(case: Case, name: str) -> None:
    x, weight = make_inputs(case)
    got = multiply(name, x, weight)
    assert got.dtype == np.float32
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # Rounding errors of one chain of K products of size 1: each of a sum of size sqrt(K).
    limit = 2.4e-7 * case.in_size
    assert np.abs(got - want).max() < limit, np.abs(got - want).max() / limit


@pytest.mark.parametrize("rows", [3, 8, 16])
def test_company_makes_no_difference(rows: int) -> None:
    """Bit for bit the same with other rows beside it, and at another place."""
    x, weight = make_inputs(Case(name="", out_size=48, in_size=1600, rows=rows))
    together = multiply("cpu", x, weight)
    for row in range(rows):
        pair = multiply("cpu", jnp.stack([x[(row + 1) % rows], x[row]]), weight)
        assert pair[1].tobytes() == together[row].tobytes()


def test_kernel_serves_few_rows_and_xla_the_rest() -> None:
    for rows, ours in ((1, False), (2, True), (cpu.FEW_ROWS, True), (cpu.FEW_ROWS + 1, False)):
        x, weight = make_inputs(Case(name="", out_size=16, in_size=16, rows=rows))
        call = jax.jit(functools.partial(float_matmul, implementation="cpu"))
        assert (cpu.TARGET in call.lower(x, weight).as_text()) == ours, rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "tpu"}, "it runs on cpu, not on tpu"),
        ({"dtype": "bfloat16"}, "bfloat16 is not float32"),
        ({"out_size": 100}, "100 outputs are no multiple of 16"),
        ({"in_size": 8}, "8 inputs are no multiple of 16"),
    ],
)
def test_refusals_name_every_reason(change: dict[str, object], reason: str) -> None:
    facts = {"platform": "cpu", "dtype": "float32", "out_size": 96, "in_size": 64} | change
    choice = dispatch.choose("float_matmul", **facts)  # type: ignore[arg-type]
    assert choice.implementation == "reference"
    assert choice.refused["cpu"] == (reason,)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        float_matmul(jnp.ones((2, 16)), jnp.ones((16, 32)), implementation="cpu")
