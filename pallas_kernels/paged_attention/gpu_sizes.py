"""Sizes of tiles, blocks and splits of the GPU kernels, by rule (step 6b).

Everything here follows from a model's shapes and dtypes. Nothing follows from the number of rows
or sequences of a batch: a sequence is cut in the same way whatever is computed beside it. The
numbers were chosen on paper, from registers and shared memory, and checked by the compiler; they
have not been tuned on a device.
"""

from __future__ import annotations

import dataclasses

import numpy as np

#: A tensor core's smallest tile; also the smallest head size that is not padded.
SMALLEST_DOT = 16
#: Query tokens that a tile of the split kind should hold: a token and three drafts.
DRAFTS = 4
#: So many programs at once are enough for the largest GPUs (132 to 148 cores).
FULL_CHIP = 132
#: A sequence of so many tokens fills the chip alone.
LONG = 4096
#: Numbers of a tile's sums that four warps hold without running out of registers; float32
#: operands, which no tensor core takes, need registers beside them.
HELD_BY_FOUR_WARPS, HELD_IN_FLOAT32 = 64 * 128, 16 * 128
SMALLEST_SPLIT, LARGEST_SPLIT = 128, 512
#: Partial results of one sequence: at most so many per query head and token of a group.
MOST_PARTS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rule looks at. group: query heads per KV head; compute_dtype: of the products."""

    num_kv_heads: int
    group: int
    head_size: int
    page_dtype: np.dtype
    compute_dtype: np.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileSize:
    """A tile: at most `tokens` query tokens of one sequence with one KV head's query heads.

    rows: tokens * group, rounded up to a power of two. warps: of 32 threads, per program.
    """

    tokens: int
    rows: int
    warps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How work is cut.

    few: tiles of sequences with few query tokens, whose keys are split over programs; many: tiles
    of all others. lanes: head size rounded up to a power of two. block_tokens: keys folded at a
    time. split_tokens: keys of a split, more where a sequence would have over most_splits of them.
    """

    lanes: int
    few: TileSize
    many: TileSize
    block_tokens: int
    split_tokens: int
    most_splits: int
    stages: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def choose_sizes(facts: Facts) -> Sizes:
    """The rule."""
    lanes = max(SMALLEST_DOT, power_of_two(facts.head_size))
    wide = facts.compute_dtype.itemsize > 2
    few_rows = min(64, max(SMALLEST_DOT, power_of_two(DRAFTS * facts.group)))
    # float32 products take no tensor core, and their operands twice the registers.
    many_rows = 32 if wide else 64
    block_tokens = max(SMALLEST_DOT, min(64, (2**11 if wide else 2**13) // lanes))
    split = LONG * facts.num_kv_heads // FULL_CHIP
    split_tokens = max(SMALLEST_SPLIT, min(LARGEST_SPLIT, power_of_two(split)))
    most_splits = max(16, min(128, power_of_two(MOST_PARTS // facts.num_kv_heads)))
    return Sizes(
        lanes=lanes,
        few=_tile(few_rows, lanes, facts),
        many=_tile(many_rows, lanes, facts),
        block_tokens=block_tokens,
        split_tokens=split_tokens,
        most_splits=most_splits,
        stages=2 if wide else 3,
    )


def _tile(rows: int, lanes: int, facts: Facts) -> TileSize:
    tokens = max(1, rows // facts.group)
    rows = max(SMALLEST_DOT, power_of_two(tokens * facts.group))
    most = HELD_BY_FOUR_WARPS if facts.compute_dtype.itemsize == 2 else HELD_IN_FLOAT32
    return TileSize(tokens=tokens, rows=rows, warps=4 if rows * lanes <= most else 8)
