"""Compiles the CPU kernels that an engine needs, or loads them, beside its weights (before step 1).

Numba's import and a kernel's code take as long as reading weights; both wait for other things.
Kernels that this machine has not compiled yet are compiled by other processes (`kernel_child`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxserve.engine.kernel_child import ATTENTION, PRODUCTS
from jaxserve.engine.program_store import program_digest
from jaxserve.quantization.weights import Quantization
from pallas_kernels import dispatch
from pallas_kernels.float_matmul import cpu as float_cpu
from pallas_kernels.paged_attention import cpu
from pallas_kernels.quantized_matmul import cpu as quantized_cpu

logger = logging.getLogger("jaxserve.engine")

_CHILD = "jaxserve.engine.kernel_child"


def load_kernels(
    folder: pathlib.Path,
    *,
    attention: dispatch.Choice,
    page_dtype: np.dtype,
    quantization: Quantization | None,
    products: Collection[str] = (),
) -> None:
    """Loads those of the chosen implementations that are CPU kernels; a second call finds them.

    products: implementations of plain products. Must come before programs that hold the kernels.
    """
    if attention.implementation == "cpu":
        cpu.load(folder, page_dtype=page_dtype)
    if quantization is not None:
        for form in (quantization.layers, quantization.embedding):
            if form.implementation == "cpu":
                quantized_cpu.load(form.scheme, folder)
    if "cpu" in products:
        float_cpu.load(folder)


def begin_loading_kernels(
    folder: pathlib.Path,
    *,
    attention: dispatch.Choice,
    page_dtype: np.dtype,
    quantization: Quantization | None,
) -> Callable[[], None]:
    """Starts `load_kernels` in a thread; what it returns waits for that thread.

    What goes wrong here shows when `load_kernels` is called again.
    """

    def load() -> None:
        try:
            _compile_beside(folder, needed_kernels(attention, page_dtype, quantization))
            load_kernels(
                folder, attention=attention, page_dtype=page_dtype, quantization=quantization
            )
        except Exception as error:
            logger.debug("kernels could not be loaded early: %s", error)

    thread = threading.Thread(target=load, name="kernels", daemon=True)
    thread.start()
    return thread.join


def needed_kernels(
    attention: dispatch.Choice, page_dtype: np.dtype, quantization: Quantization | None
) -> list[list[str]]:
    """What `kernel_child` is asked for: one list per process, none for other implementations."""
    forms = [] if quantization is None else [quantization.layers, quantization.embedding]
    names = {form.scheme.name for form in forms if form.implementation == "cpu"}
    lists = [[f"{PRODUCTS}:{name}" for name in sorted(names)]]
    if attention.implementation == "cpu":
        lists.append([f"{ATTENTION}:{page_dtype.name}"])
    return [each for each in lists if each]


def _compile_beside(folder: pathlib.Path, lists: Sequence[Sequence[str]]) -> None:
    """Has other processes compile what this machine's folder does not hold yet.

    A mark in the folder says so, by sources, interpreter and names; without need of it, Numba's own
    index decides. A child that fails leaves its work to this process.
    """
    said = (program_digest(), sys.version, lists)
    mark = folder / f"compiled-{hashlib.sha256(repr(said).encode()).hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    if mark.exists() or not os.access(folder, os.W_OK):
        return
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(folder), *names],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for names in lists
    ]
    codes = [child.wait() for child in children]
    if any(codes):
        logger.debug("kernels are compiled here: other processes ended with %s", codes)
    else:
        mark.touch()
