"""The doctor's look at everything that can be seen without jax."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys
import tempfile

import jaxserve
from jaxserve.cli.doctor_report import Section, megabytes
from jaxserve.config import ServerConfig, cache_folder
from jaxserve.errors import ResourceError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numba", "numpy", "tokenizers")
#: Present only where an accelerator is used.
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton")
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
#: x86 instructions that the kernels and XLA use, as /proc/cpuinfo calls them.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
#: Free space below which a model or its compiled programs may not fit.
LITTLE_DISK = 10**9


def look_at_installation(python: tuple[int, int] | None = None) -> Section:
    """Versions. python: (major, minor), None for the one that runs."""
    section = Section(title="installation")
    major, minor = python or sys.version_info[:2]
    section.say("jaxserve", jaxserve.__version__)
    section.say("python", f"{platform.python_version()} ({sys.executable})")
    if not OLDEST_PYTHON <= (major, minor) <= NEWEST_PYTHON:
        section.complain(
            f"Python {major}.{minor} is not supported; make the virtual environment with one of "
            "3.11 to 3.13"
        )
    for name in PACKAGES:
        version = _version(name)
        section.say(name, version or "missing")
        if version is None:
            section.complain(f"the package {name} is missing; install jaxserve again with pip")
    for name in PLUGINS:
        version = _version(name)
        if version is not None:
            section.say(name, version)
    if _version("jax") != _version("jaxlib"):
        section.complain(
            f"jax {_version('jax')} and jaxlib {_version('jaxlib')} do not belong together; "
            "install jaxserve again with pip"
        )
    return section


def look_at_processor(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> Section:
    """Cores and instructions."""
    section = Section(title="processor")
    section.say("machine", f"{platform.system()} {platform.machine()}")
    section.say("cores", _usable_cores())
    flags = _cpu_flags(cpuinfo)
    if flags:
        known = [name for name in FEATURES if name in flags]
        section.say("instructions", " ".join(known) or "none that matter")
        if platform.machine() == "x86_64" and not {"avx2", "fma"} <= flags:
            section.say("", "without avx2 and fma a CPU is slow: expect seconds per token")
    return section


def look_at_cache(folder: pathlib.Path | None = None) -> Section:
    """The folder for models and compiled programs. None: the configured one."""
    section = Section(title="cache folder")
    folder = cache_folder() if folder is None else folder
    section.say("path", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        section.complain(
            f"the cache folder {folder} cannot be written ({error.strerror}); set JAXSERVE_CACHE "
            "to a folder that can"
        )
        return section
    for part in ("models", "programs"):
        section.say(part, megabytes(_size(folder / part)))
    free = shutil.disk_usage(folder).free
    section.say("free", megabytes(free))
    if free < LITTLE_DISK:
        section.complain(
            f"the disk of the cache folder {folder} has {megabytes(free)} free; make room, or set "
            "JAXSERVE_CACHE to a folder elsewhere"
        )
    return section


def look_at_port(server: ServerConfig) -> Section:
    """Whether `jaxserve serve` could listen now."""
    from server.launch import bind

    section = Section(title="port")
    try:
        bind(server.host, server.port).close()
    except ResourceError as error:
        section.complain(str(error))
    else:
        section.say("free", f"{server.host}:{server.port}")
    return section


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_flags(cpuinfo: pathlib.Path) -> set[str]:
    """The first processor's flags, empty where there is no such file."""
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _size(folder: pathlib.Path) -> int:
    """Bytes of all files in it; another process may be changing it."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total
