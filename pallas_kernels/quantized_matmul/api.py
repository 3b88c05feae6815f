"""Products with quantised weights: what layers call (step 6).

    scheme = named_scheme("int8_group32_a8")
    choice = dispatch.choose("quantized_matmul", platform=..., dtype=..., scheme=scheme,
                             out_size=N, in_size=K)
    weight = pack(quantize(w, scheme), scheme, implementation=choice)       # once, when loading
    y = quantized_matmul(x, weight, scheme, implementation=choice)          # any number of rows

The number of rows M is no fact of the choice: an implementation serves all. An implementation is
a module with `refusals(*, platform, dtype, scheme, out_size, in_size)` and
`quantized_matmul(x, weight, scheme, *, out_dtype)`; one that reads weights in a layout of its own
also has `pack(weight, scheme)`, which keeps shapes, and `take_rows(weight, scheme, row_ids)`. Must
not know models, files or the mesh: each device runs it on its own part of the weight
(`jax.shard_map`), packed part by part.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Choice
from pallas_kernels.quantized_matmul.quantize import abstract_weight, dequantize, quantize
from pallas_kernels.quantized_matmul.scheme import SCHEMES, QuantizedWeight, Scheme, named_scheme

__all__ = [
    "SCHEMES",
    "QuantizedWeight",
    "Scheme",
    "abstract_packed",
    "abstract_weight",
    "dequantize",
    "named_scheme",
    "pack",
    "quantize",
    "quantized_matmul",
    "take_rows",
]


def pack(
    weight: QuantizedWeight, scheme: Scheme, *, implementation: Choice | str
) -> QuantizedWeight:
    """A weight of the natural layout in the one that `implementation` reads.

    Shapes and the dtype of values stay; scales and zero points may become float32, and float16 the
    same bits as uint16. Where a weight is split over devices each packs its own part.
    """
    own = getattr(_module(implementation), "pack", None)
    return weight if own is None else own(weight, scheme)


def abstract_packed(
    out_size: int, in_size: int, scheme: Scheme, *, implementation: Choice | str
) -> QuantizedWeight:
    """Shapes and dtypes of what `pack` makes of a weight [N, K], without arrays."""
    packed: QuantizedWeight = jax.eval_shape(
        lambda weight: pack(weight, scheme, implementation=implementation),
        abstract_weight(out_size, in_size, scheme),
    )
    return packed


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    scheme: Scheme,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: Choice | str,
) -> jax.Array:
    """x [M, K] times weight [N, K] transposed: [M, N] in out_dtype (None: x's dtype).

    weight: as `pack` made it for this implementation; see `reference` for the definition.
    Raises ValueError when shapes or dtypes contradict one another or the scheme.
    """
    _check(x, weight, scheme)
    out: jax.Array = _module(implementation).quantized_matmul(
        x, weight, scheme, out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    )
    return out


def take_rows(
    weight: QuantizedWeight,
    scheme: Scheme,
    row_ids: jax.Array,
    *,
    implementation: Choice | str,
) -> jax.Array:
    """Rows of a weight as `pack` made it, dequantised: float32 [T, K] of row_ids [T] (int32).

    What an embedding does that shares its weight with the output head. Ids are clipped to [0, N).
    """
    row_ids = jnp.clip(row_ids, 0, weight.scales.shape[0] - 1)
    own = getattr(_module(implementation), "take_rows", None)
    if own is not None:
        rows: jax.Array = own(weight, scheme, row_ids)
        return rows
    values, scales, zeros = weight
    taken = None if zeros is None else zeros[row_ids]
    return dequantize(QuantizedWeight(values[row_ids], scales[row_ids], taken), scheme)


def _module(implementation: Choice | str) -> Any:
    name = implementation.implementation if isinstance(implementation, Choice) else implementation
    return importlib.import_module(f"pallas_kernels.quantized_matmul.{name}")


def _check(x: jax.Array, weight: QuantizedWeight, scheme: Scheme) -> None:
    if x.ndim != 2 or weight.values.ndim != 2:
        raise ValueError(f"quantized_matmul: x {x.shape} and values {weight.values.shape} are 2-D")
    out_size, in_size = weight.values.shape[0], x.shape[1]
    want = abstract_weight(out_size, in_size, scheme)
    found = []
    for name, leaf, wanted in zip(QuantizedWeight._fields, weight, want, strict=True):
        if leaf is None or wanted is None:
            if leaf is not wanted:
                found.append(f"{name} are {'missing' if leaf is None else 'not in the scheme'}")
        elif leaf.shape != wanted.shape or leaf.dtype not in (
            wanted.dtype,
            *(() if name == "values" else (jnp.float32,)),
            *((jnp.uint16,) if wanted.dtype == jnp.float16 else ()),
        ):
            given = f"{leaf.dtype} {leaf.shape}"
            found.append(f"{name} are {given}, not {wanted.dtype} {wanted.shape}")
    if found:
        raise ValueError(f"quantized_matmul, {scheme.name}, x {x.shape}: {'; '.join(found)}")
