"""The Triton kernel of quantised products, by Triton's interpreter, against the definition.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own
(this file as a program), which prints one line per call; they skip where Triton is missing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import cases, gpu, gpu_blocks, reference
from pallas_kernels.quantized_matmul.cases import Case
from pallas_kernels.quantized_matmul.scheme import SCHEMES, QuantizedWeight, Scheme

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BY_NAME = {case.name: case for case in (*cases.SMALL, *cases.ODD)}
#: Rows that are split into parts, and a shape that fills no tile.
SPLIT = Case(name="split", rows=5, out_size=40, in_size=2048)
#: (case, scheme, dtype): every kind of value, scale and rounding; few rows, many, and split.
CALLS = [
    *(("rows-13", name, "float32") for name in SCHEMES if "a16" not in name and "64" not in name),
    *(("wide", name, "bfloat16") for name in ("int8", "int4_group32_zero", "int8_token", "fp8")),
    *(("split", name, "float32") for name in ("int8_token", "int4_group128", "int8", "fp8_token")),
    ("odd-outputs", "int4_group64_zero", "float32"),
    ("one-output", "int8_group32_a8", "bfloat16"),
]
CASES = BY_NAME | {SPLIT.name: SPLIT}


class Array:
    """What Triton's interpreter wants of an argument, around a numpy array."""

    def __init__(self, array: np.ndarray, dtype: Any) -> None:
        self.array, self.dtype = array, dtype
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Array:
        return self

    def cpu(self) -> Array:
        return self

    def copy_(self, other: Array) -> None:
        assert other.array is self.array  # the interpreter works in our memory

    def new_empty(self, *_: Any, **__: Any) -> Array:
        return Array(self.array, self.dtype)

    def set_(self, storage: Array, *_: Any) -> None:
        self.array = storage.array

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape


def interpreted(
    x: jax.Array, weight: QuantizedWeight, scheme: Scheme, rows: slice = slice(None)
) -> jax.Array:
    """The product, float32, of `gpu.quantized_matmul` with the kernel interpreted.

    rows: of x, those that the kernel gets after x was rounded.
    """
    import triton.language as tl

    from pallas_kernels.quantized_matmul.gpu_kernel import matmul

    names = {
        "float32": tl.float32,
        "bfloat16": tl.bfloat16,
        "float16": tl.float16,
        "int8": tl.int8,
        "uint8": tl.uint8,
        "int32": tl.int32,
        "float8_e4m3fn": tl.float8e4nv,
    }
    given, x_scales = jax.tree.map(lambda leaf: leaf[rows], gpu._activations(x, scheme))
    call = gpu.plan_call(given, x_scales, weight, scheme, jnp.dtype("float32"))
    # Where the kernel does not write, what it finds there stays.
    out = np.full(call.out_shape.shape, 77, call.out_shape.dtype)
    arrays = [np.array(leaf) for leaf in call.arguments]
    arguments = [Array(leaf, names[leaf.dtype.name]) for leaf in (*arrays, out)]
    matmul[call.grid](*arguments, **call.settings | {"UPCAST": True})
    made = jnp.asarray(out)
    if made.ndim == 2:
        return made
    return gpu.finish(made, x_scales, weight, scheme, jnp.dtype("float32"))


def error_of(got: np.ndarray, x: jax.Array, weight: QuantizedWeight, scheme: Scheme) -> float:
    """The largest difference to the definition, as a share of what sums of float32 may be off."""
    want = np.asarray(reference.quantized_matmul(x, weight, scheme, out_dtype=jnp.float32))
    sizes = QuantizedWeight(weight.values, jnp.abs(weight.scales.astype(jnp.float32)), None)
    whole = np.abs(np.asarray(reference.whole_values(weight.values, scheme))) + 15
    scale = np.repeat(np.asarray(sizes.scales), x.shape[1] // sizes.scales.shape[1], axis=1)
    size = np.abs(np.asarray(x, np.float32)) @ (whole * scale).T
    limit = 6e-8 * (6 + np.sqrt(x.shape[1]) / 4) * size + 1e-30
    return float(np.max(np.abs(got - want) / limit))


def main() -> None:
    """The child: every call, a few changed ones that must be wrong, and rows alone."""
    for name, scheme_name, dtype in CALLS:
        scheme = SCHEMES[scheme_name]
        inputs = cases.make_inputs(CASES[name], scheme, dtype=dtype)
        got = np.asarray(interpreted(inputs.x, inputs.weight, scheme))
        error = error_of(got, inputs.x, inputs.weight, scheme)
        alone = np.asarray(interpreted(inputs.x, inputs.weight, scheme, slice(1)))
        # Triton multiplies tiles of few and of many outputs alike; the interpreter's numpy does not.
        same = got.shape[0] > gpu_blocks.TILE_ROWS or alone.tobytes() == got[:1].tobytes()
        near = error_of(alone, inputs.x[:1], inputs.weight, scheme)
        print(json.dumps({"error": max(error, near), "alone": same}), flush=True)
    scheme = SCHEMES["int4_group32_zero"]
    inputs = cases.make_inputs(CASES["rows-13"], scheme)
    weight = inputs.weight
    swapped = weight._replace(values=(weight.values >> 4) | (weight.values << 4))
    shifted = weight._replace(scales=jnp.roll(weight.scales, 1, axis=1))
    without = weight._replace(zeros=jnp.zeros_like(weight.zeros))
    for wrong in (swapped, shifted, without):
        got = np.asarray(interpreted(inputs.x, wrong, scheme))
        print(json.dumps({"error": error_of(got, inputs.x, weight, scheme)}), flush=True)
    broken = inputs.x.at[3, 5].set(jnp.inf)
    finite = np.isfinite(np.asarray(interpreted(broken, weight, scheme)))
    print(json.dumps({"finite": finite.all(axis=1).tolist()}), flush=True)


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What the child printed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install triton interprets its kernels anywhere")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("number", "call"), list(enumerate(CALLS)), ids=["-".join(call) for call in CALLS]
)
def test_equals_the_definition(
    answers: list[dict[str, Any]], number: int, call: tuple[str, str, str]
) -> None:
    """And a row alone gives the same bits as in company that fills no more than a tile."""
    assert answers[number]["error"] <= 1.0
    assert answers[number]["alone"]


def test_planted_mistakes_are_found(answers: list[dict[str, Any]]) -> None:
    """Nibbles swapped, scales of the neighbouring group, no zero points."""
    assert all(answer["error"] > 2.0 for answer in answers[len(CALLS) : len(CALLS) + 3])


def test_infinity_stays_in_its_row(answers: list[dict[str, Any]]) -> None:
    assert answers[-1]["finite"] == [row != 3 for row in range(13)]


FACTS: dict[str, Any] = {
    "platform": "gpu",
    "dtype": "bfloat16",
    "scheme": SCHEMES["int8"],
    "out_size": 4096,
    "in_size": 4096,
}


@pytest.fixture
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_with_triton")
@pytest.mark.parametrize("name", [name for name in SCHEMES if not name.endswith("_a16")])
def test_what_is_not_refused(name: str) -> None:
    assert gpu.refusals(**FACTS | {"scheme": SCHEMES[name]}) == []


@pytest.mark.usefixtures("_with_triton")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "tpu"}, "it runs on gpu, not on tpu"),
        ({"dtype": "float16"}, "x of float16 is not among"),
        ({"scheme": SCHEMES["int8_group32_a16"]}, "no tensor core multiplies int16"),
        ({"scheme": Scheme(name="g48", values="int8", group=64), "in_size": 96}, "g48: rows of 96"),
        ({"scheme": Scheme(name="g16", values="int8", group=16)}, "groups of 16 are not among"),
        ({"scheme": Scheme(name="whole", values="int4")}, "int4 needs groups"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    (found,) = gpu.refusals(**FACTS | change)
    assert reason in found


def test_missing_packages_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu.refusals(**FACTS) == [
        "the package triton is not installed",
        "the package jax_triton is not installed",
    ]


@pytest.mark.parametrize("case", cases.FULL, ids=[case.name for case in cases.FULL])
def test_columns_are_cut_alike_for_any_number_of_rows(case: Case) -> None:
    for name in ("int8", "int4_group32"):
        scheme = SCHEMES[name]
        cuts = set()
        for rows in (1, 64, 65, 4096):
            blocks = gpu_blocks.choose_blocks(
                scheme, rows=rows, out_size=case.out_size, in_size=case.in_size, wide=False
            )
            assert blocks.split * blocks.splits >= case.in_size
            cuts.add((blocks.columns, blocks.split, blocks.splits))
        assert len(cuts) == 1


def test_no_rows() -> None:
    scheme = SCHEMES["int8"]
    inputs = cases.make_inputs(dataclasses.replace(BY_NAME["rows-3"], rows=0), scheme)
    out = gpu.quantized_matmul(inputs.x, inputs.weight, scheme, out_dtype=jnp.bfloat16)
    assert (out.shape, out.dtype) == ((0, 64), jnp.bfloat16)


if __name__ == "__main__":
    main()
