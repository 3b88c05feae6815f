"""XLA handlers in Numba: the header, the cache, several processes, several threads."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ffi import abi, targets, vectors

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def header() -> str:
    from jaxlib import xla_client

    path = pathlib.Path(xla_client.__file__).parent / "include/xla/ffi/api/c_api.h"
    if not path.is_file():
        pytest.skip("this jaxlib ships no FFI header")
    return re.sub(r"//[^\n]*", "", path.read_text())


STRUCTS = {
    "XLA_FFI_Extension_Base": abi.ExtensionBase,
    "XLA_FFI_Api_Version": abi.ApiVersion,
    "XLA_FFI_Metadata": abi.Metadata,
    "XLA_FFI_Metadata_Extension": abi.MetadataExtension,
    "XLA_FFI_Buffer": abi.Buffer,
    "XLA_FFI_Args": abi.Args,
    "XLA_FFI_Rets": abi.Rets,
    "XLA_FFI_Attrs": abi.Attrs,
    "XLA_FFI_Scalar": abi.Scalar,
    "XLA_FFI_CallFrame": abi.CallFrame,
    "XLA_FFI_Error_Create_Args": abi.ErrorCreateArgs,
    "XLA_FFI_Error_Destroy_Args": abi.ErrorDestroyArgs,
    "XLA_FFI_ThreadPool_Schedule_Args": abi.ThreadPoolScheduleArgs,
    "XLA_FFI_ThreadPool_NumThreads_Args": abi.ThreadPoolNumThreadsArgs,
    "XLA_FFI_Api": abi.Api,
}
SIZES = {"size_t": 8, "int64_t": 8, "int": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4}


def size_of_field(kind: str) -> int:
    if "*" in kind:
        return 8
    kind = kind.replace("const", "").replace("struct ", "").strip()
    if kind in STRUCTS:
        return ctypes.sizeof(STRUCTS[kind])
    return SIZES.get(kind, 8 if kind == "XLA_FFI_TypeId" else 4)  # the rest are enums


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name: str) -> None:
    body = re.search(rf"struct {name} {{(.*?)\n}}", header(), re.DOTALL)
    assert body is not None
    found = []
    for line in body[1].split(";"):
        field = line.strip()
        if macro := re.match(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", field):
            found.append((macro[1], 8))
        elif match := re.match(r"(.*?[\s*])(\w+)$", field, re.DOTALL):
            found.append((match[2], size_of_field(match[1])))
    struct = STRUCTS[name]
    ours = [(field, getattr(struct, field).size) for field, *_ in struct._fields_]
    assert ours == found[: len(ours)]
    if name != "XLA_FFI_Api":  # it grows at its end
        assert len(ours) == len(found)


def test_constants_are_those_of_the_header() -> None:
    text = header()

    def value(name: str) -> int:
        match = re.search(rf"\b{name}\s*=?\s*(\d+)\b", text)
        assert match is not None, name
        return int(match[1])

    assert (value("XLA_FFI_API_MAJOR"), value("XLA_FFI_API_MINOR")) == abi.API_VERSION
    assert value("XLA_FFI_ExecutionStage_EXECUTE") == abi.STAGE_EXECUTE
    assert value("XLA_FFI_Extension_Metadata") == abi.EXTENSION_METADATA
    assert value("XLA_FFI_DataType_F32") == abi.F32
    assert value("XLA_FFI_DataType_BF16") == abi.BF16
    assert value("XLA_FFI_Error_Code_INVALID_ARGUMENT") == abi.INVALID_ARGUMENT
    assert value("XLA_FFI_Error_Code_RESOURCE_EXHAUSTED") == abi.RESOURCE_EXHAUSTED


# A second kernel, which shares everything that can be shared with others: a factory of loops over
# XLA's threads, and functions of the same names in other modules.
SMALL_KERNEL = '''
"""Multiplies by {factor}: y[i] = {factor} * x[i]."""
from pallas_kernels.ffi.abi import *
from pallas_kernels.ffi.pool import make_parallel_for

@compiled
def work(context, index):
    value = load_f32(load_i64(context) + 4 * index)
    store_f32(load_i64(context + 8) + 4 * index, value * {factor})

run = make_parallel_for(work, "{name}")

def handler(frame):
    if not must_run(frame):
        return 0
    if dtype_of(argument(frame, 0)) != F32:
        return make_error(frame, INVALID_ARGUMENT, text("{name}: x must be float32"))
    context = stack_slots(2)
    store_i64(context, data_of(argument(frame, 0)))
    store_i64(context + 8, data_of(result(frame, 0)))
    run(frame, context, size_of(argument(frame, 0), 0))
    return 0
'''

PROGRAM = """
import importlib, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.ffi import targets
folder, cache = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
sys.path.insert(0, str(folder))
x = jnp.arange(4096, dtype=jnp.float32)
loaded = []
for name in sys.argv[3:]:
    module = importlib.import_module(name)
    loaded.append(targets.load(name, module.handler, [module], cache))
for name in sys.argv[3:]:
    call = jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    for _ in range(20):
        np.testing.assert_array_equal(call(x), x * float(name.removeprefix("times_")))
print(*(item.from_cache for item in loaded))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("kernels")
    for factor in (2, 3):
        name = f"times_{factor}"
        (folder / f"{name}.py").write_text(SMALL_KERNEL.format(factor=factor, name=name))
    return folder


def start(program: str, *arguments: str, root: pathlib.Path = REPOSITORY) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return out.strip()


def test_kernels_cached_by_different_processes_do_not_mix(
    kernels: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Each is compiled in a process of its own, at once; then loaded together in both orders."""
    cache = tmp_path / "cache"
    first = [start(PROGRAM, str(kernels), str(cache), f"times_{i}") for i in (2, 3)]
    assert [finish(process) for process in first] == ["False", "False"]
    for order in (("times_2", "times_3"), ("times_3", "times_2")):
        assert finish(start(PROGRAM, str(kernels), str(cache), *order)) == "True True"


def test_changed_sources_are_compiled_again(kernels: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(kernels, folder)
    arguments = (PROGRAM, str(folder), str(tmp_path / "cache"), "times_2")
    assert finish(start(*arguments)) == "False"
    source = folder / "times_2.py"
    stamp = source.stat()
    source.write_text(source.read_text().replace("value * 2", "2 * value"))
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same time, same length
    assert finish(start(*arguments)) == "False"


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    def handler(frame: int) -> int:
        abi.must_run(frame)
        return 0

    loaded = targets.load("test_blocked_folder", handler, (), blocked / "inside")
    assert loaded.folder is None
    assert not loaded.from_cache
    again = targets.load("test_blocked_folder", handler, (), tmp_path)
    assert again is loaded


def test_package_folder_may_be_read_only(tmp_path: pathlib.Path) -> None:
    """Nothing is written beside the sources."""
    copy = tmp_path / "site"
    shutil.copytree(
        REPOSITORY / "pallas_kernels",
        copy / "pallas_kernels",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (copy / "times_5.py").write_text(SMALL_KERNEL.format(factor=5, name="times_5"))
    before = sorted(path.name for path in copy.rglob("*"))
    process = start(
        "import sys; sys.dont_write_bytecode = True\n" + PROGRAM,
        str(copy),
        str(tmp_path / "cache"),
        "times_5",
        root=copy,
    )
    assert finish(process) == "False"
    assert sorted(path.name for path in copy.rglob("*")) == before
    assert list((tmp_path / "cache").rglob("*.nbc"))


ATTENTION = """
import pathlib, sys, functools
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.paged_attention import api, cases
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax._src import monitoring
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
case = next(case for case in cases.SMALL if case.name == "mixed")
inputs = cases.make_inputs(case)
call = jax.jit(functools.partial(api.paged_attention, implementation="cpu", **inputs.options))
out, _ = call(inputs.q, inputs.k, inputs.v, inputs.pages, inputs.batch)
print("hit" if "/jax/compilation_cache/cache_hits" in events else "miss", np.asarray(out).sum())
"""


def test_persistent_compilation_cache(tmp_path: pathlib.Path) -> None:
    """A program with the kernel, compiled by another process, finds the kernel."""
    first = finish(start(ATTENTION, str(tmp_path))).split()
    second = finish(start(ATTENTION, str(tmp_path))).split()
    assert (first[0], second[0]) == ("miss", "hit")
    assert first[1] == second[1]


def test_errors_of_a_handler_are_errors_of_the_program(
    kernels: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    sys.path.insert(0, str(kernels))
    try:
        import times_3  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(kernels))
    targets.load("times_3", times_3.handler, [times_3], tmp_path)
    x = jnp.arange(64, dtype=jnp.int32)
    call = jax.jit(jax.ffi.ffi_call("times_3", jax.ShapeDtypeStruct(x.shape, jnp.float32)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="times_3: x must be float32"):
        jax.block_until_ready(call(x))
    np.testing.assert_array_equal(call(x.astype(jnp.float32)), 3 * x.astype(jnp.float32))


def test_exp2_in_float32() -> None:
    """Against float64: about one unit in the last place, exact where that can be."""
    from numba import njit

    exp2 = vectors.exp2

    @njit
    def each(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(x.size):
            out[i] = exp2(x[i])

    x = np.concatenate([np.linspace(-126, 0, 200_001), np.arange(-126, 1)]).astype(np.float32)
    out = np.empty_like(x)
    each(x, out)
    want = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(out / want - 1)) < 1.5e-7
    assert (out[-127:] == want[-127:]).all()
    special = np.array([-127.0, -1e30, np.nan, -np.inf], np.float32)
    each(special, out[:4])
    np.testing.assert_array_equal(out[:4], [0, 0, np.nan, 0])
