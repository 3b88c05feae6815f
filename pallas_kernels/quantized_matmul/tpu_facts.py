"""What a product with a quantised weight is on a TPU: its sizes, and how its weight lies (step 6).

Memory consists of tiles with 128 numbers side by side, and the matrix unit takes as many columns
at once. Everything that kernels and block sizes derive from shapes, dtypes and the scheme is
here. Must not know the kernels' code.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from pallas_kernels.quantized_matmul.scheme import Scheme

#: How scales meet the products; see `tpu_kernels`.
Way = Literal["end", "sums", "weights"]

LANES, SUBLANES = 128, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What block sizes depend on: shapes and dtypes of a call. rows: of x, without padding."""

    rows: int
    out_size: int
    in_size: int
    scheme: Scheme
    dtype: np.dtype
    out_dtype: np.dtype

    @property
    def padded_rows(self) -> int:
        """Rows of x that fill whole tiles of memory."""
        for tile in (8, 16):
            if self.rows <= tile:
                return tile
        return filled(self.rows, 32)

    @property
    def columns(self) -> int:
        """Stored columns of the weight."""
        return self.scheme.values_shape(self.out_size, self.in_size)[1]

    @property
    def num_halves(self) -> int:
        """Weights in a stored column."""
        return self.in_size // self.columns

    @property
    def num_groups(self) -> int:
        return self.scheme.num_groups(self.in_size)

    @property
    def group_columns(self) -> int:
        """Stored columns of a group."""
        return self.columns // self.num_groups

    @property
    def column_step(self) -> int:
        """A block has a multiple of these columns, or all: whole groups and whole vectors."""
        return LANES if self.num_groups == 1 else math.lcm(LANES, self.group_columns)

    @property
    def values_turned(self) -> bool:
        """Whether the kernels take the weight's values as [columns, outputs]."""
        return is_turned(self.out_size, self.columns)

    @property
    def scales_turned(self) -> bool:
        """Whether they take scales and zero points as [groups, outputs]."""
        return is_turned(self.out_size, self.num_groups)

    @property
    def sum_columns(self) -> int:
        """Columns that "sums" multiplies at once: of one group, or of all that share a vector."""
        return self.group_columns if self.group_columns % LANES == 0 else LANES

    @property
    def strip_groups(self) -> int:
        """Groups in a strip, at most."""
        size = self.group_columns
        if size % LANES == 0:
            return 1
        return max(
            -(-(start + LANES) // size) - start // size for start in range(0, self.columns, LANES)
        )

    def num_planes(self, way: Way) -> int:
        """bfloat16 arrays (or one of int8) whose sum is x, rounded as the scheme says."""
        is_short = self.dtype == np.dtype("bfloat16")
        if self.scheme.activations == "float":
            return 1 if is_short else 3
        if way == "weights":
            return 2 if is_short else 3
        return 2 if self.scheme.activations == "int16_group" else 1


def is_turned(rows: int, columns: int) -> bool:
    """Whether XLA keeps an array [rows, columns] column after column.

    Memory consists of tiles with 128 numbers side by side, and XLA lays arguments out in the way
    that leaves less of it empty. A kernel that asks for the other way gets a copy.
    """
    return filled(columns, 8) * filled(rows, LANES) < filled(rows, 8) * filled(columns, LANES)


def filled(size: int, step: int = LANES) -> int:
    """The next multiple of a step."""
    return -(-size // step) * step
