"""Compiles for NVIDIA GPUs that are not here, in a process of its own (`pytest -m compile`).

The CUDA plugin wants its settings in the environment before jax starts its backends, and tests
have started them for CPUs. So `Compiler` runs this file as a child, which reads calls as lines of
JSON and answers each with a line: what the compiled program takes, or the compiler's error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

INSTALL = "pip install '.[gpu-compile,test]' compiles for GPUs anywhere"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Bytes that a compiled program takes; or the error.

    shared: shared memory of a Triton kernel's program; spilled: bytes of registers that did not
    fit, per thread.
    """

    alias: int = 0
    temporary: int = 0
    shared: int = 0
    spilled: int = 0
    error: str = ""


def ptxas() -> pathlib.Path | None:
    """NVIDIA's assembler, where the package that brings it is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else list(spec.submodule_search_locations or ()):
        for found in pathlib.Path(folder).glob("*/bin/ptxas"):
            return found
    return None


class Compiler:
    """A child process that compiles for one kind of GPU."""

    def __init__(self, chip: str) -> None:
        from pallas_kernels import gpu_targets

        if not gpu_targets.is_installed():
            pytest.skip(f"jax's CUDA plugin is not installed: {INSTALL}")
        environment = dict(os.environ) | {"PYTHONPATH": str(REPOSITORY)}
        gpu_targets.prepare_environment(environment)
        if ptxas() is not None:
            # Or Triton writes PTX for its own, newer assembler.
            environment["TRITON_PTXAS_BLACKWELL_PATH"] = str(ptxas())
        self.child = subprocess.Popen(
            [sys.executable, __file__, chip],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def attention(self, case: Any, **settings: Any) -> Answer:
        """Compiles paged attention of a case; settings as `_attention` takes them."""
        return self._ask({"op": "attention", "case": dataclasses.asdict(case)} | settings)

    def matmul(self, case: Any, **settings: Any) -> Answer:
        """Compiles a quantised product; settings as `_matmul` takes them."""
        return self._ask({"op": "matmul", "case": dataclasses.asdict(case)} | settings)

    def _ask(self, job: dict[str, Any]) -> Answer:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(job) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, f"the compiling process ended with {self.child.wait(10)}"
        return Answer(**json.loads(line))

    def close(self) -> None:
        """Ends the child."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()


def num_pages(case: Any, page_dtype: str, leaf_bytes: int) -> int:
    """So many that a leaf of the pool takes leaf_bytes, about."""
    page = case.num_kv_heads * case.page_size * case.head_size
    return int(leaf_bytes // (page * np.dtype(page_dtype).itemsize))


def pool_bytes(case: Any, page_dtype: str, leaf_bytes: int) -> int:
    """Of both leaves, and of their scales."""
    heads = num_pages(case, page_dtype, leaf_bytes) * case.page_size * case.num_kv_heads
    item = np.dtype(page_dtype).itemsize
    return 2 * heads * (case.head_size * item + (4 if item == 1 else 0))


def _attention(
    mesh: Any,
    case: Any,
    *,
    dtype: str,
    page_dtype: str,
    leaf_bytes: int,
    donate: bool = True,
    block_tokens: int | None = None,
) -> Any:
    """The compiled program of a case. block_tokens: a size to use instead of the rule's."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from pallas_kernels.paged_attention import gpu, gpu_sizes
    from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch

    def here(shape: tuple[int, ...], kind: str) -> Any:
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=whole)

    rows, sequences = sum(case.q_lens), len(case.q_lens)
    width = -(-max(case.kv_lens) // case.page_size)
    count = num_pages(case, page_dtype, leaf_bytes)
    shape = (count, case.num_kv_heads, case.page_size, case.head_size)
    scales = [here(shape[:3], "float32")] * 2 if page_dtype in QUANTISED else []
    new = here((rows, case.num_kv_heads, case.head_size), dtype)
    arguments = (
        here((rows, case.num_heads, case.head_size), dtype),
        new,
        new,
        KVPages(here(shape, page_dtype), here(shape, page_dtype), *scales),
        PagedBatch(
            here((sequences, width), "int32"),
            here((sequences + 1,), "int32"),
            here((sequences,), "int32"),
        ),
        here((case.num_heads,), "float32") if case.sinks else None,
    )

    def call(*given: Any) -> Any:
        *others, sinks = given
        return gpu.paged_attention(
            *others, scale=0.1, window=case.window, soft_cap=case.soft_cap, sinks=sinks
        )

    rule = gpu_sizes.choose_sizes
    with pytest.MonkeyPatch.context() as patch:
        if block_tokens is not None:
            patch.setattr(
                gpu_sizes,
                "choose_sizes",
                lambda facts: dataclasses.replace(rule(facts), block_tokens=block_tokens),
            )
        jitted = jax.jit(call, donate_argnums=3 if donate else ())
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        return lowered.compile()


def _matmul(mesh: Any, case: Any, *, dtype: str, scheme: str) -> Any:
    """The compiled program of a quantised product."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from pallas_kernels.quantized_matmul import gpu
    from pallas_kernels.quantized_matmul.quantize import abstract_weight
    from pallas_kernels.quantized_matmul.scheme import SCHEMES

    def here(leaf: Any) -> Any:
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    kind = SCHEMES[scheme]
    x = here(jax.ShapeDtypeStruct((case.rows, case.in_size), jnp.dtype(dtype)))
    weight = jax.tree.map(here, abstract_weight(case.out_size, case.in_size, kind))
    jitted = jax.jit(lambda x, weight: gpu.quantized_matmul(x, weight, kind, out_dtype=dtype))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jitted.trace(x, weight).lower(lowering_platforms=("cuda",)).compile()


def _assembled(folder: str, capability: tuple[int, int]) -> dict[str, Any]:
    """What ptxas says about the one kernel whose PTX is in `folder`, and its shared memory."""
    (info,) = pathlib.Path(folder).glob("*/*.compile_info")
    (ptx,) = pathlib.Path(folder).glob("*/*.ptx")
    arch = f"-arch=sm_{capability[0]}{capability[1]}a"
    command = [str(ptxas()), "-v", arch, str(ptx), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        return {"error": f"ptxas: {said}"}
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return {
        "shared": int(re.findall(r"shared_mem_bytes: ?(\d+)", info.read_text())[0]),
        "spilled": 0 if spilled is None else int(spilled[1]),
    }


def _answer_matmul(mesh: Any, chip: str, case: Any, settings: dict[str, Any]) -> Answer:
    from pallas_kernels import gpu_targets

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        import jax_triton.triton_lib as triton_lib

        patch.setattr(triton_lib, "_JAX_TRITON_DUMP_DIR", folder)
        patch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
        answer = _answer(functools.partial(_matmul, mesh, case, **settings))
        if answer.error:
            return answer
        assembled = _assembled(folder, gpu_targets.TARGETS[chip].capability)
        return dataclasses.replace(answer, **assembled)


def _answer(compile_job: Any) -> Answer:
    try:
        memory = compile_job().memory_analysis()
    except Exception as error:  # whatever the compiler says is the answer
        return Answer(error=f"{type(error).__name__}: {error}")
    return Answer(alias=memory.alias_size_in_bytes, temporary=memory.temp_size_in_bytes)


def main(chip: str) -> None:
    """The child: a call a line, until there are no more."""
    from jax.sharding import Mesh

    from pallas_kernels import gpu_targets
    from pallas_kernels.paged_attention import cases as attention_cases
    from pallas_kernels.quantized_matmul import cases as matmul_cases

    mesh = Mesh(np.array(gpu_targets.gpu_topology(chip).devices), ("only",))
    for line in sys.stdin:
        job = json.loads(line)
        op, fields = job.pop("op"), job.pop("case")
        if op == "matmul":
            answer = _answer_matmul(mesh, chip, matmul_cases.Case(**fields), job)
        else:
            lengths = {name: tuple(fields[name]) for name in ("q_lens", "kv_lens")}
            case = attention_cases.Case(**fields | lengths)
            answer = _answer(functools.partial(_attention, mesh, case, **job))
        print(json.dumps(dataclasses.asdict(answer)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
