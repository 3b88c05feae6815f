"""The Triton kernel of quantised products compiles for NVIDIA GPUs.

XLA only carries Triton's PTX and does not look into it, so NVIDIA's assembler is run on it here,
and its shared memory is compared with the chip's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import compile_gpu
import pytest
from compile_gpu import Answer, Compiler

from pallas_kernels import gpu_targets
from pallas_kernels.quantized_matmul import cases
from pallas_kernels.quantized_matmul.cases import Case
from pallas_kernels.quantized_matmul.scheme import SCHEMES

pytestmark = [pytest.mark.compile, pytest.mark.timeout(120)]

BY_NAME = {case.name: case for case in (*cases.FULL, *cases.ODD)}
NAMES = [name for name in SCHEMES if not name.endswith("_a16")]
#: (chip, case, scheme, dtype): every scheme for few rows and many; sizes that fill no tile; splits.
CALLS = [
    *(
        ("h100", f"llama-3.1-8b-out-{rows}", name, "bfloat16")
        for name in NAMES
        for rows in (1, 512)
    ),
    *(("h100", "smollm2-down-8", name, "bfloat16") for name in NAMES if "128" in name),
    *(
        ("h100", f"llama-3.1-8b-down-{rows}", name, "float32")
        for name in ("int8", "int4_group32_zero", "int8_token", "fp8")
        for rows in (8, 512)
    ),
    ("h100", "odd-outputs", "int4_group32", "bfloat16"),
    ("h100", "gemma-3-270m-head-32", "int8_group128", "bfloat16"),
    *(
        ("b200", f"llama-3.1-8b-out-{rows}", name, "bfloat16")
        for name in ("int8", "int4_group128_zero", "int8_token", "fp8_token")
        for rows in (1, 512)
    ),
]


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, Compiler]]:
    """Child processes, one per kind of GPU, that tests start when they need them."""
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {compile_gpu.INSTALL}")
    if compile_gpu.ptxas() is None:
        pytest.skip(f"ptxas is not installed: {compile_gpu.INSTALL}")
    started: dict[str, Compiler] = {}
    yield started
    for compiler in started.values():
        compiler.close()


def compile_case(
    compilers: dict[str, Compiler], chip: str, case: Case, scheme: str, dtype: str
) -> Answer:
    if chip not in compilers:
        compilers[chip] = Compiler(chip)
    return compilers[chip].matmul(case, scheme=scheme, dtype=dtype)


@pytest.mark.parametrize(("chip", "name", "scheme", "dtype"), CALLS)
def test_compiles(
    compilers: dict[str, Compiler], chip: str, name: str, scheme: str, dtype: str
) -> None:
    case = BY_NAME[name]
    answer = compile_case(compilers, chip, case, scheme, dtype)
    assert answer.error == ""
    assert 0 < answer.shared <= gpu_targets.TARGETS[chip].shared_bytes_per_block
    assert answer.spilled <= 64
    # Rounded activations, and eight splits' sums where rows are few.
    parts = 8 * case.rows * case.out_size * 4 if case.rows <= 64 else 0
    assert answer.temporary <= parts + 8 * case.rows * case.in_size + 2**20
