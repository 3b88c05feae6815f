"""Sampling compiles for TPUs that are not here, and needs little memory there."""

from __future__ import annotations

import functools

import compile_targets
import jax
import pytest

from pallas_kernels.sample import api, cases
from pallas_kernels.sample.cases import Case

pytestmark = pytest.mark.compile


def shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the arguments of `sample`, without making them."""
    logits = jax.ShapeDtypeStruct((case.rows, case.vocab_size), "float32")
    filters = [jax.ShapeDtypeStruct((case.rows,), dtype) for dtype in ("float32", "int32")]
    seeds = jax.ShapeDtypeStruct((case.rows, 2), "uint32")
    number, count = filters
    return logits, number, count, number, number, seeds, count


@pytest.mark.parametrize("chip", compile_targets.CHIPS)
@pytest.mark.parametrize("case", cases.FULL, ids=lambda case: case.name)
def test_compiles_for_tpu(case: Case, chip: str) -> None:
    with compile_targets.libtpu_loaded():
        mesh = compile_targets.one_chip(compile_targets.CHIPS[chip])
        place = jax.NamedSharding(mesh, jax.P())
        arguments = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place) for each in shapes(case)
        ]
        call = jax.jit(functools.partial(api.sample, implementation="xla"))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        # A handful of arrays as large as the logits; the definition's sorts need a dozen.
        most = 10 * 4 * case.rows * case.vocab_size + 16 * compile_targets.MEBIBYTE
        assert compiled.memory_analysis().temp_size_in_bytes <= most
