"""Compiles CPU kernels into the cache folder, in a process of its own (before step 1).

    python -m jaxserve.engine.kernel_child FOLDER (attention:PAGE_DTYPE | products:SCHEME)...

Numba compiles under the interpreter's lock: another process is how a second core helps. The
engine's own process then finds the code in the folder. Must not touch an accelerator.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

ATTENTION, PRODUCTS = "attention", "products"


def compile_kernels(folder: pathlib.Path, wanted: Sequence[str]) -> None:
    """Compiles what `wanted` names, or finds it compiled."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import cpu
    from pallas_kernels.quantized_matmul import cpu as quantized_cpu
    from pallas_kernels.quantized_matmul.scheme import named_scheme

    for each in wanted:
        kind, _, name = each.partition(":")
        if kind == ATTENTION:
            cpu.load(folder, page_dtype=jnp.dtype(name))
        else:
            assert kind == PRODUCTS, each
            quantized_cpu.load(named_scheme(name), folder)


if __name__ == "__main__":
    compile_kernels(pathlib.Path(sys.argv[1]), sys.argv[2:])
