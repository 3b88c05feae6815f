"""The one choice of an implementation per op: by platform, shape and dtype (step 6b).

Made once, where an engine is put together; `doctor` and the log print the `Choice`. Implementations
stand in a plain table, best first; a module is imported only when its op is asked for. Every such
module has a function `refusals(*, platform, **facts)` that lists in words why it cannot do a call;
the definition (`reference`) of an op refuses nothing that has a meaning. Must not know jaxserve.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping

from pallas_kernels.errors import KernelError

#: Op -> implementations, best first; each is a module of the op's folder.
IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "paged_attention": ("cpu", "tpu", "gpu", "reference"),
    "grouped_matmul": ("ragged_dot", "tokamax", "tiles", "reference"),
    "sample": ("xla", "reference"),
    "quantized_matmul": ("cpu", "tpu", "gpu", "reference"),
    "float_matmul": ("cpu", "reference"),
}
#: What `kernels` may be: the best that works, or one implementation and nothing else.
AUTO, REFERENCE = "auto", "reference"
ENVIRONMENT_VARIABLE = "JAXSERVE_KERNELS"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation that an op got, and why each better one was refused."""

    op: str
    implementation: str
    refused: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        """One line for the log."""
        reasons = "; ".join(f"not {name}: {', '.join(why)}" for name, why in self.refused.items())
        return f"{self.op}: {self.implementation}" + (f" ({reasons})" if reasons else "")


def kernels_from_environment() -> str:
    """JAXSERVE_KERNELS, or "auto". Read where settings are read, and passed to `choose`."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or AUTO


def choose(
    op: str,
    *,
    platform: str,
    kernels: str = AUTO,
    implementations: Mapping[str, tuple[str, ...]] = IMPLEMENTATIONS,
    **facts: object,
) -> Choice:
    """The first implementation of `op` that does not refuse.

    platform: "cpu", "gpu" or "tpu", as `jax.Device.platform` has it. kernels: "auto", or the name
    of the only implementation allowed ("reference" for the definition); a name that only other ops
    have means "auto". facts: what the op's `refusals` functions take: for paged_attention dtype,
    page_dtype, num_heads, num_kv_heads, head_size, page_size; for quantized_matmul dtype, scheme,
    out_size, in_size; for sample vocab_size; for grouped_matmul dtype. Raises KernelError with every
    reason when all refuse.
    """
    if op not in implementations:
        raise KernelError(f"there is no op {op!r}; there are {', '.join(implementations)}")
    names = implementations[op]
    if kernels not in (AUTO, *names):
        known = sorted({name for each in implementations.values() for name in each})
        if kernels not in known:
            raise KernelError(f"kernels is {kernels!r}; use {AUTO} or one of {', '.join(known)}")
        kernels = AUTO
    refused: dict[str, tuple[str, ...]] = {}
    for name in names:
        if kernels not in (AUTO, name):
            refused[name] = (f"kernels is {kernels!r}",)
            continue
        module = importlib.import_module(f"pallas_kernels.{op}.{name}")
        reasons = tuple(module.refusals(platform=platform, **facts))
        if not reasons:
            return Choice(op=op, implementation=name, refused=refused)
        refused[name] = reasons
    every = "; ".join(f"{name}: {', '.join(why)}" for name, why in refused.items())
    raise KernelError(f"no implementation of {op} can do this: {every}")
