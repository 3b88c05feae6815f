"""Compiles the CPU kernels that an engine needs, or loads them, beside its weights (before step 1).

Numba's import and a kernel's code take as long as reading weights; both wait for other things.
"""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Collection

import numpy as np

from jaxserve.quantization.weights import Quantization
from pallas_kernels import dispatch
from pallas_kernels.float_matmul import cpu as float_cpu
from pallas_kernels.paged_attention import cpu
from pallas_kernels.quantized_matmul import cpu as quantized_cpu

logger = logging.getLogger("jaxserve.engine")


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
) -> None:
    """`load_kernels` in a thread of its own; who needs a kernel calls that and waits.

    What goes wrong here shows there.
    """

    def load() -> None:
        try:
            load_kernels(
                folder, attention=attention, page_dtype=page_dtype, quantization=quantization
            )
        except Exception as error:
            logger.debug("kernels could not be loaded early: %s", error)

    threading.Thread(target=load, name="kernels", daemon=True).start()
