"""Compiled programs on disk, so that a second start neither traces nor compiles (before step 1).

jax's own persistent cache saves the compiler's work, but its key is the traced program, and tracing
thirty unrolled layers for every bucket takes most of a warm start. Here the key is all that
a program depends on: our source, jax, the machine, the model's shape, the settings. A file that
does not fit or cannot be read is compiled again; nothing else depends on this folder.

Where jax's own cache is switched on, nothing is stored here: on CPUs an executable that came out of
that cache loses its functions when it is serialised again, and only running it would show that.
Nor is anything stored for GPUs of several hosts: these share what they measure while they compile,
so that one which loads instead would leave the others waiting. Elsewhere every process has its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

import pallas_kernels

logger = logging.getLogger("jaxserve.engine")

#: Sets of programs that are kept; the one unused for longest goes when a new one is stored.
MAX_SETS = 16
#: What of jaxserve a program's instructions follow from, beside all of pallas_kernels. A change
#: elsewhere (in the scheduler, say) leaves stored programs as they are; a test finds what is missing.
PROGRAM_SOURCES = (
    "config.py",
    "request.py",
    "engine/buckets.py",
    "engine/build.py",
    "engine/compiling.py",
    "engine/device_state.py",
    "engine/packing.py",
    "engine/programs.py",
    "engine/step_device.py",
    "layers",
    "models",
    "parallel",
    "quantization",
    "sampling",
)


class ProgramStore:
    """A folder of serialised executables for one set of facts.

    facts: everything that shapes the programs beside our source and the machine; only their
    repr counts. devices: those that the programs run on, in the mesh's order.
    """

    def __init__(
        self, folder: pathlib.Path, devices: Sequence[jax.Device], facts: Sequence[object]
    ) -> None:
        self.num_loaded = 0
        self._devices = list(devices)
        self._used = jax.process_count() == 1 or devices[0].platform != "gpu"
        kinds = [(device.platform, device.device_kind, device.id) for device in devices]
        process = (jax.process_index(), jax.process_count())
        parts = [_environment(), program_digest(), repr((kinds, process)), *map(repr, facts)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self._folder = folder / digest

    def get(
        self,
        name: str,
        arguments: tuple[Any, ...],
        make_output: Callable[[], Any],
        compile_program: Callable[[], jax.stages.Compiled],
    ) -> jax.stages.Compiled:
        """The program `name`, from disk or compiled (and then kept).

        arguments: stand-ins for the program's arguments. make_output: gives any value with the
        structure of its result. Both are needed because structures are not in the file.
        """
        if not self._used:
            return compile_program()
        path = self._folder / f"{name}.jaxexe"
        try:
            program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                path.read_bytes(),
                jax.tree.structure((arguments, {})),
                jax.tree.structure(make_output()),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            pass
        except Exception as error:  # any damage at all means: compile again
            logger.warning("the stored program %s cannot be used (%s); compiling it", path, error)
        else:
            self.num_loaded += 1
            os.utime(self._folder)
            return program
        program = compile_program()
        self._put(path, program)
        return program

    def _put(self, path: pathlib.Path, program: jax.stages.Compiled) -> None:
        if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
            return
        try:
            data, _, _ = serialize_executable.serialize(program)
            if not self._folder.exists():
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._forget_old_sets()
            partial = path.with_suffix(f".{os.getpid()}.part")
            partial.write_bytes(data)
            partial.replace(path)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            logger.warning("the program %s could not be stored: %s", path.name, error)

    def _forget_old_sets(self) -> None:
        sets = sorted(self._folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in sets[:-MAX_SETS]:
            shutil.rmtree(folder, ignore_errors=True)


def source_digest() -> str:
    """SHA-256 over all source files of jaxserve and its kernels."""
    return _digest((root, path) for root in _roots() for path in sorted(root.rglob("*.py")))


def program_digest() -> str:
    """SHA-256 over the source files that programs are made from."""
    return _digest(program_sources())


def program_sources() -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Those files, in order, each with its package's folder."""
    ours, kernels = _roots()
    for root, name in ((kernels, "."), *((ours, name) for name in PROGRAM_SOURCES)):
        place = root / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield root, path


def _roots() -> tuple[pathlib.Path, pathlib.Path]:
    assert pallas_kernels.__file__ is not None
    return pathlib.Path(__file__).parents[1], pathlib.Path(pallas_kernels.__file__).parent


def _digest(files: Iterable[tuple[pathlib.Path, pathlib.Path]]) -> str:
    digest = hashlib.sha256()
    for root, path in files:
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def processor() -> str:
    """Model and instruction sets of this machine's processor; empty where Linux does not tell."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return " ".join(line for line in lines if line.startswith(("flags", "Features", "model name")))


def _environment() -> str:
    return " ".join(
        (
            sys.version,
            jax.__version__,
            jaxlib.version.__version__,
            platform.platform(),
            platform.machine(),
            processor(),
            os.environ.get("XLA_FLAGS", ""),
            str(os.cpu_count()),
        )
    )
