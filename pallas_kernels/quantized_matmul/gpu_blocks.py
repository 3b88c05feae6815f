"""Sizes of the GPU kernel's tiles, by rule (step 6).

A row's arithmetic must not depend on how many rows there are: blocks and splits of the columns
follow from the weight's shape only, and tiles are always 64 rows high, which is one tensor core
instruction's height on Hopper; with many rows a tile only has more outputs. Chosen on paper and
checked by the compiler; not tuned on a device.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.quantized_matmul.scheme import Scheme

TILE_ROWS = 64
#: Outputs of a tile: few, to have many programs, where the rows fill one tile; else more.
FEW_OUTPUTS, MANY_OUTPUTS = 32, 128
#: Many outputs where the block needs more registers: x of float32, and groups of 128.
MANY_OUTPUTS_OF_LARGE_BLOCKS, LARGE_BLOCK = 64, 128
#: Columns of a block where scales belong to whole rows.
BLOCK = 64
#: Programs that keep the memory of the largest GPUs busy, and the fewest columns of one.
PROGRAMS, FEWEST_COLUMNS, MOST_SPLITS = 2 * 132, 512, 8
WARPS, STAGES = 4, 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A tile's outputs, a block's columns; a split's columns, how many splits there are, and
    whether each is a program of its own (few rows) or one program does all of them."""

    outputs: int
    columns: int
    split: int
    splits: int
    apart: bool

    @property
    def parts(self) -> int:
        """Programs along the columns."""
        return self.splits if self.apart else 1


def choose_blocks(scheme: Scheme, *, rows: int, out_size: int, in_size: int, wide: bool) -> Blocks:
    """The rule. wide: x is float32."""
    columns = scheme.group or BLOCK
    blocks = -(-in_size // columns)
    programs, splits = -(-out_size // FEW_OUTPUTS), 1
    while (
        programs * splits < PROGRAMS
        and splits < MOST_SPLITS
        and blocks % (2 * splits) == 0
        and in_size >= 2 * splits * FEWEST_COLUMNS
    ):
        splits *= 2
    few = rows <= TILE_ROWS
    large = wide or columns >= LARGE_BLOCK
    many_outputs = MANY_OUTPUTS_OF_LARGE_BLOCKS if large else MANY_OUTPUTS
    return Blocks(
        outputs=FEW_OUTPUTS if few else many_outputs,
        columns=columns,
        split=blocks // splits * columns,
        splits=splits,
        apart=few,
    )
