"""What a quantised weight is: its scheme by name, and its arrays (step 6).

A scheme says how weights are stored and how activations are rounded; it is static, chosen when a
model is put together. Names: the weight's values and group, `_zero` with zero points, then `_a8` or
`_a16` where activations are rounded to int8 or int16 per group, `_token` where per row of x. Must
not know any implementation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError

Values = Literal["int8", "int4", "float8_e4m3fn"]
Activations = Literal["float", "int8_token", "int8_group", "int16_group", "fp8_token"]

#: Largest magnitude that a format's numbers have where it is symmetric about zero.
LARGEST: Mapping[str, float] = {"int8": 127.0, "int16": 32767.0, "float8_e4m3fn": 448.0}
#: Largest group with int16 activations: sums of int8 times int16 stay below 2**31.
LARGEST_INT16_GROUP = 512
#: The zero point of int4 without stored zero points: nibbles 0 to 15 mean -8 to 7.
INT4_ZERO = 8.0
#: What scales and zero points may be stored as.
SCALE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are stored and activations rounded.

    values: what a weight is stored as. group: weights of a row that share a scale; None: the whole
    row. zeros: int4 only: a zero point per scale is stored. activations: "float": used as they
    are; "int8_token": rounded to int8 with one scale per row of x; "int8_group": with one scale
    per row of x and group of K (the weight's group); "int16_group": likewise to int16, which is
    nearly exact; "fp8_token": rounded to float8_e4m3fn with one scale per row. scale_dtype: of
    scales and zero points, one of SCALE_DTYPES.
    """

    name: str
    values: Values
    group: int | None = None
    zeros: bool = False
    activations: Activations = "float"
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        assert self.group is None or (self.group > 0 and self.group % 2 == 0), self
        assert not self.zeros or self.values == "int4", self
        assert not self.activations.endswith("_group") or self.group is not None, self
        assert self.activations != "int16_group" or (self.group or 0) <= LARGEST_INT16_GROUP, self
        assert self.activations != "fp8_token" or self.values == "float8_e4m3fn", self
        assert not self.activations.startswith("int") or self.values != "float8_e4m3fn", self
        assert self.scale_dtype in SCALE_DTYPES, self

    def group_size(self, in_size: int) -> int:
        """Weights that share a scale in a row of in_size."""
        return self.group or in_size

    def num_groups(self, in_size: int) -> int:
        """Scales of a row. Raises KernelError when groups do not fill it."""
        size = self.group_size(in_size)
        if in_size < 1 or in_size % size:
            raise KernelError(
                f"{self.name}: rows of {in_size} weights are not made of groups of {size}; "
                "use a scheme whose group divides the row"
            )
        if self.values == "int4" and in_size % 2:
            raise KernelError(
                f"{self.name}: a row of {in_size} weights is no whole number of bytes"
            )
        return in_size // size

    def values_shape(self, out_size: int, in_size: int) -> tuple[int, int]:
        """Shape of `QuantizedWeight.values`, in the natural layout, for a weight [N, K]."""
        return out_size, in_size // 2 if self.values == "int4" else in_size

    @property
    def values_dtype(self) -> jnp.dtype:
        """Of `QuantizedWeight.values`."""
        return jnp.dtype("uint8" if self.values == "int4" else self.values)

    def bytes_per_weight(self, in_size: int) -> float:
        """Bytes read per weight, scales and zero points included."""
        scales = (1 + self.zeros) * jnp.dtype(self.scale_dtype).itemsize
        return (0.5 if self.values == "int4" else 1.0) + scales / self.group_size(in_size)


class QuantizedWeight(NamedTuple):
    """A weight [N, K] (out, in) of a scheme; a pytree of two or three arrays.

    values: int8 [N, K], float8_e4m3fn [N, K], or uint8 [N, K / 2] for int4: byte j of a row holds
    column 2 j in its low and column 2 j + 1 in its high nibble.
    scales: [N, K / group] of the scheme's scale_dtype; zeros: the same or None.

        weight[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group]

    Without zeros the zero point is 0, and 8 for int4, whose nibbles are read as 0 to 15. Zero
    points need not be whole numbers. This is the natural layout; `api.pack` may give another one
    of the same shapes and dtypes.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None


def _schemes() -> dict[str, Scheme]:
    found = [
        Scheme(name="int8", values="int8"),
        Scheme(name="int8_token", values="int8", activations="int8_token"),
        Scheme(name="fp8", values="float8_e4m3fn"),
        Scheme(name="fp8_token", values="float8_e4m3fn", activations="fp8_token"),
    ]
    rounded: dict[str, Activations] = {"": "float", "_a8": "int8_group", "_a16": "int16_group"}
    for group in (32, 64, 128):
        for values, zeros in (("int8", False), ("int4", False), ("int4", True)):
            for suffix, activations in rounded.items():
                scheme = Scheme(
                    name=f"{values}_group{group}{'_zero' if zeros else ''}{suffix}",
                    values="int4" if values == "int4" else "int8",
                    group=group,
                    zeros=zeros,
                    activations=activations,
                    scale_dtype="float16",
                )
                found.append(scheme)
    return {scheme.name: scheme for scheme in found}


#: Every scheme with a name. Others can be made; nothing depends on being in this table.
SCHEMES: Mapping[str, Scheme] = _schemes()


def named_scheme(name: str) -> Scheme:
    """The scheme of a name. Raises KernelError with the names there are."""
    if name not in SCHEMES:
        raise KernelError(f"there is no quantisation {name!r}; use {', '.join(SCHEMES)}")
    return SCHEMES[name]
