"""Records of a call in compiled code: named fields at an address (step 6b).

Compiled functions take the address and open the record inside: Numba would spell out all fields
of a record among the arguments in the name of the function, at a cost in compile time. Must not
know any op.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from pallas_kernels.ffi.abi import primitive


def record(integers: str, floats: str = "") -> np.dtype[np.void]:
    """A record of 64-bit integers (sizes, flags and addresses) and of float32 with these names."""
    fields = [(name, np.int64) for name in integers.split()]
    return np.dtype([*fields, *((name, np.float32) for name in floats.split())], align=True)


def record_at(kind: np.dtype[np.void]) -> Any:
    """A primitive: the record that stands at an address."""
    numba_kind = numba.from_dtype(kind)

    def at(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(numba_kind))

        return numba_kind(types.intp), emit

    return primitive(at)
