"""Block sizes of the TPU kernel: by rule, or from the table of measured ones (step 6b).

    tile_tokens    query tokens of one sequence that are attended together; a sequence with one
                   query token (decoding) always has a tile of its own size, 1
    block_tokens   KV tokens that are fetched together, twice over: one block is computed while
                   the next one is on its way
    writes         writes of new keys and values that are in flight together

VMEM, a TPU's fast memory, holds all buffers; what they take is computed here and checked before
anything is compiled. `tpu_blocks.json` holds block sizes that were measured to be better than the
rule on a kind of device; it has none until somebody measures. Must not know the kernel's code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.reference import QUANTISED
from pallas_kernels.paged_attention.tpu_layout import (
    LANES,
    TokenLayout,
    scale_lanes,
    token_layout,
)

MEBIBYTE = 2**20
#: What a kernel may take; v5e and v6e have 128 MiB, 7x has 64, and XLA uses some of it.
VMEM_LIMIT_BYTES = 40 * MEBIBYTE
#: Part of the limit that the rule leaves to the compiler, for values that do not fit registers.
VMEM_RESERVE_BYTES = 6 * MEBIBYTE
#: A block of keys, and one of values, of this size keeps the memory busy while one is computed.
BLOCK_BYTES = 512 * 1024
#: A block costs its whole computation however few of its tokens there are.
BLOCK_TOKENS = 1024
#: Query tokens that share one reading of the keys and values. A chip's operations per byte of
#: memory traffic are 240 (v5e), 560 (v6e), 310 (7x); attention in bfloat16 has one per query head
#: of a KV head and token: with the usual 4 and 8 heads this is about enough.
TILE_TOKENS = 128
#: Query rows of one KV head, at most: more only take VMEM.
TILE_ROWS = 1024
#: Writes in flight, at most.
MOST_WRITES = 32
TABLE = pathlib.Path(__file__).with_name("tpu_blocks.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes that change the speed of a call and not its meaning; see the module's docstring."""

    tile_tokens: int
    block_tokens: int
    writes: int
    vmem_limit_bytes: int = VMEM_LIMIT_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What block sizes depend on: shapes and dtypes of a call, and whether it returns log-sums."""

    num_rows: int
    num_kv_heads: int
    group: int
    head_size: int
    page_size: int
    pages_per_sequence: int
    page_dtype: np.dtype
    compute_dtype: np.dtype
    with_lse: bool = False

    @property
    def layout(self) -> TokenLayout:
        return token_layout(self.head_size)

    @property
    def page_rows(self) -> int:
        """Rows of lanes of one page and head."""
        return self.page_size // self.layout.pack

    @property
    def out_lanes(self) -> int:
        """Lanes of a row of the output; the log-sum, if any, lies behind the head."""
        return self.layout.lanes + (LANES if self.with_lse else 0)

    @property
    def scaled(self) -> bool:
        """Whether the pages have scales."""
        return self.page_dtype.name in QUANTISED

    @property
    def scale_lanes(self) -> int:
        """Lanes of the row of scales of one page and head."""
        return scale_lanes(self.page_size)

    @property
    def write_rows(self) -> int:
        """Rows of a page that are read and written together: whole tiles of the memory."""
        return math.gcd(self.page_rows, 8 * 4 // self.page_dtype.itemsize)

    @property
    def scales_before(self) -> int:
        """Tokens of padding before the scales of the new tokens."""
        whole = LANES * self.layout.pack
        return -(-self.page_size // whole) * whole

    @property
    def staged_scales(self) -> tuple[int, int, int, int]:
        """Shape of the scales of the new tokens: [pack, lanes' worth of tokens, K, 128], K filled
        up to whole tiles."""
        whole = LANES * self.layout.pack
        tokens = 2 * self.scales_before + self.num_rows + whole
        heads = -(-self.num_kv_heads // 8) * 8
        return self.layout.pack, -(-tokens // whole), heads, LANES

    @property
    def write_tokens(self) -> int:
        """Tokens in `write_rows` rows."""
        return self.write_rows * self.layout.pack

    @property
    def block_step(self) -> int:
        """Blocks are whole pages, and their logits fill whole rows of lanes."""
        return math.lcm(self.page_size, LANES * self.layout.pack)

    def rows(self, tile_tokens: int) -> int:
        """Rows of the matrix of one KV head's queries in a tile, for one of `pack` parts."""
        return -(-tile_tokens * self.group // 8) * 8


def vmem_bytes(blocks: Blocks, facts: Facts) -> dict[str, int]:
    """Bytes of VMEM that each block size asks for, by its name."""
    heads, lanes = facts.num_kv_heads, facts.layout.lanes
    query_rows = heads * facts.rows(blocks.tile_tokens)
    all_rows = query_rows * facts.layout.pack
    block_rows = blocks.block_tokens // facts.layout.pack
    one_write = (
        facts.write_rows * lanes * facts.page_dtype.itemsize + facts.write_tokens * lanes * 4
    )
    tile = query_rows * (2 * lanes + facts.out_lanes) * 4  # queries, twice, and the output
    tile += all_rows * (lanes * facts.compute_dtype.itemsize + lanes * 4 + 2 * LANES * 4)
    tile += facts.rows(blocks.tile_tokens) * facts.layout.pack * LANES * 4  # positions
    # Logits, weights and a copy of the weights of one head; one head of keys and values.
    values = 3 * facts.rows(blocks.tile_tokens) * facts.layout.pack * block_rows * 4
    values += 2 * block_rows * lanes * facts.compute_dtype.itemsize
    pages = 2 * 2 * heads * block_rows * lanes * facts.page_dtype.itemsize
    writes = 2 * blocks.writes * heads * one_write
    if facts.scaled:
        row = heads * facts.scale_lanes * 4
        pages += 2 * 2 * blocks.block_tokens // facts.page_size * row
        writes += 2 * (blocks.writes * row + math.prod(facts.staged_scales) * 4)
    return {"tile_tokens": tile, "block_tokens": pages + values, "writes": writes}


def check(blocks: Blocks, facts: Facts) -> None:
    """Raises KernelError, naming the size to change, when blocks do not fit the call or VMEM."""
    if blocks.tile_tokens & (blocks.tile_tokens - 1) or blocks.tile_tokens < 1:
        raise KernelError(f"tile_tokens is {blocks.tile_tokens}; it must be a power of two")
    if blocks.block_tokens % facts.block_step or blocks.block_tokens < 1:
        raise KernelError(
            f"block_tokens is {blocks.block_tokens}; it must be a multiple of {facts.block_step}"
        )
    if blocks.writes < 2:
        raise KernelError(f"writes is {blocks.writes}; it must be at least 2")
    needed = vmem_bytes(blocks, facts)
    if sum(needed.values()) > blocks.vmem_limit_bytes:
        largest = max(needed, key=lambda name: needed[name])
        raise KernelError(
            f"paged attention needs {sum(needed.values()) / MEBIBYTE:.1f} MiB of VMEM and may take "
            f"{blocks.vmem_limit_bytes / MEBIBYTE:.1f}; shrink {largest} (it is "
            f"{getattr(blocks, largest)} and takes {needed[largest] / MEBIBYTE:.1f} MiB)"
        )


def choose_blocks(facts: Facts, device_kind: str, table: pathlib.Path = TABLE) -> Blocks:
    """The measured sizes for this call where the table has them, else those of the rule."""
    measured = find_measured(json.loads(table.read_text())["entries"], facts, device_kind)
    blocks = rule(facts) if measured is None else measured
    check(blocks, facts)
    return blocks


def find_measured(
    entries: Sequence[Mapping[str, Any]], facts: Facts, device_kind: str
) -> Blocks | None:
    """The entry of a table whose every condition is met; the first of several."""
    call = {
        "device_kind": device_kind,
        "num_kv_heads": facts.num_kv_heads,
        "group": facts.group,
        "head_size": facts.head_size,
        "page_size": facts.page_size,
        "page_dtype": facts.page_dtype.name,
    }
    for entry in entries:
        if entry["call"] == call:
            return Blocks(**entry["blocks"])
    return None


def rule(facts: Facts) -> Blocks:
    """Sizes that keep the memory and the matrix unit busy, shrunk until they fit VMEM."""
    token_bytes = facts.num_kv_heads * facts.layout.lanes * facts.page_dtype.itemsize
    block_tokens = min(BLOCK_BYTES * facts.layout.pack // token_bytes, BLOCK_TOKENS)
    block_steps = block_tokens // facts.block_step
    longest = -(-facts.pages_per_sequence * facts.page_size // facts.block_step)
    block_steps = _power_of_two(max(1, min(block_steps, longest)))
    tile = _power_of_two(max(1, min(facts.num_rows, TILE_TOKENS, TILE_ROWS // facts.group)))
    writes = MOST_WRITES
    while True:
        blocks = Blocks(
            tile_tokens=tile, block_tokens=block_steps * facts.block_step, writes=writes
        )
        needed = vmem_bytes(blocks, facts)
        if sum(needed.values()) <= VMEM_LIMIT_BYTES - VMEM_RESERVE_BYTES:
            return blocks
        if writes > 4 and needed["writes"] * 8 > VMEM_LIMIT_BYTES:
            writes //= 2
        elif needed["tile_tokens"] > needed["block_tokens"] and tile > 1:
            tile //= 2
        elif block_steps > 1:
            block_steps //= 2
        elif tile > 1:
            tile //= 2
        elif writes > 2:
            writes //= 2
        else:
            return blocks  # `check` says what is too large


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)
