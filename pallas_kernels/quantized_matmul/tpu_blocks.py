"""Ways and block sizes of the TPU kernels: by rule, or from the table of measured ones (step 6).

    way        how scales meet the products, see `tpu_kernels`: "end" (a scale per output), "sums"
               (sums of groups are scaled) or "weights" (weights are scaled first)
    rows       rows of x that meet a block of the weight; with more rows the weight is read again
    outputs    rows of the weight in a block
    columns    stored columns of the weight in a block: bytes of a row, which hold two int4 each

VMEM, a TPU's fast memory, holds all blocks; what they take is computed here and checked before
anything is compiled. `tpu_blocks.json` holds sizes that were measured to be better than the rule
on a kind of device; it has none until somebody measures. Must not know the kernels' code.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.tpu_facts import LANES, SUBLANES, Facts, Way, filled

MEBIBYTE = 2**20
#: What a kernel may take; v5e and v6e have 128 MiB, 7x has 64, and XLA uses some of it.
VMEM_LIMIT_BYTES = 40 * MEBIBYTE
#: Part of the limit that the rule leaves to the compiler.
VMEM_RESERVE_BYTES = 6 * MEBIBYTE
#: A block of the weight of this size keeps the memory busy while another is multiplied.
BLOCK_BYTES = MEBIBYTE
#: A smaller weight is cut into blocks too, so that copying and multiplying overlap.
FEWEST_BLOCKS, SMALLEST_BLOCK_BYTES = 8, 128 * 1024
#: Columns of a block at most. More columns are longer runs of memory and longer code.
MOST_COLUMNS: Mapping[Way, int] = {"end": 2048, "sums": 1024, "weights": 1024}
MOST_OUTPUTS = 1024
MOST_ROWS = 512
#: With more rows than these a block has half the outputs: it has enough to multiply, and the
#: compiler writes out every vector operation.
FEW_ROWS = 64
#: "sums" multiplies every row once for each group that shares 128 columns, "weights" once or twice
#: but first scales every weight: with rows times groups above this that is less work.
MOST_SUM_ROWS = 128
#: Rows of partial sums at once, in "sums".
MOST_PART_ROWS = 512
#: Columns that "weights" scales and multiplies together.
WEIGHT_COLUMNS = 256
TABLE = pathlib.Path(__file__).with_name("tpu_blocks.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes that change the speed of a call; see the module's docstring."""

    way: Way
    rows: int
    outputs: int
    columns: int
    vmem_limit_bytes: int = VMEM_LIMIT_BYTES


def vmem_bytes(blocks: Blocks, facts: Facts) -> dict[str, int]:
    """Bytes of VMEM that each block size asks for, by its name."""
    rows, outputs, columns = blocks.rows, blocks.outputs, blocks.columns
    planes = facts.num_planes(blocks.way)
    x = 2 * rows * facts.num_halves * filled(facts.columns) * 2 * planes
    # The result twice, sums of all blocks, and two more as values.
    results = rows * filled(outputs) * (2 * facts.out_dtype.itemsize + 3 * 4)
    converted = {"end": columns, "sums": facts.sum_columns, "weights": WEIGHT_COLUMNS}
    at_once = min(columns, converted[blocks.way])
    weight = 2 * outputs * filled(columns) + outputs * filled(at_once) * facts.num_halves * 8
    if blocks.way == "sums":
        part_rows = planes * facts.strip_groups * rows
        x += part_rows * filled(at_once) * facts.num_halves * 6
        results += part_rows * filled(outputs) * 4
    kinds = 1 + facts.scheme.zeros
    if blocks.way == "end":
        scales = 2 * 8 * filled(outputs) * 4 * kinds
    else:
        held = 2 * outputs * filled(facts.num_groups) * 4
        scales = kinds * (held + 2 * filled(facts.num_groups, 8) * filled(outputs) * 4)
        x += 2 * 2 * -(-columns // facts.sum_columns) * rows * LANES * 4
    return {"rows": x + results, "outputs": scales, "columns": weight}


def check(blocks: Blocks, facts: Facts) -> None:
    """Raises KernelError, naming the size to change, when blocks do not fit the call or VMEM."""
    _check_way(blocks, facts)
    for name, whole, step in (
        ("rows", facts.padded_rows, 32),
        ("outputs", facts.out_size, LANES),
        ("columns", facts.columns, facts.column_step),
    ):
        size = getattr(blocks, name)
        if size != whole and (size % step or not 0 < size < whole):
            raise KernelError(
                f"{name} is {size}; it must be all {whole} or a multiple of {step} below"
            )
    if facts.columns % blocks.columns:
        raise KernelError(f"columns is {blocks.columns}; it must divide {facts.columns}")
    needed = vmem_bytes(blocks, facts)
    if sum(needed.values()) > blocks.vmem_limit_bytes:
        largest = max(needed, key=lambda name: needed[name])
        raise KernelError(
            f"quantized_matmul needs {sum(needed.values()) / MEBIBYTE:.1f} MiB of VMEM and may "
            f"take {blocks.vmem_limit_bytes / MEBIBYTE:.1f}; shrink {largest} (it is "
            f"{getattr(blocks, largest)} and takes {needed[largest] / MEBIBYTE:.1f} MiB)"
        )


def _check_way(blocks: Blocks, facts: Facts) -> None:
    if facts.num_groups == 1 and blocks.way != "end":
        raise KernelError(f'way is "{blocks.way}"; with one scale per output it must be "end"')
    if facts.num_groups > 1 and blocks.way == "end":
        raise KernelError('way is "end"; with scales of groups it must be "sums" or "weights"')
    if blocks.way == "weights" and not _may_scale_weights(facts):
        raise KernelError(
            f'way is "weights"; with {facts.scheme.activations} activations and groups of '
            f'{facts.scheme.group} it must be "sums"'
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
        "rows": facts.padded_rows,
        "out_size": facts.out_size,
        "in_size": facts.in_size,
        "scheme": facts.scheme.name,
        "dtype": facts.dtype.name,
    }
    for entry in entries:
        if entry["call"] == call:
            return Blocks(**entry["blocks"])
    return None


def rule(facts: Facts) -> Blocks:
    """Sizes that keep the memory and the matrix unit busy, shrunk until they fit VMEM."""
    way = _way(facts)
    columns = _columns(facts, MOST_COLUMNS[way])
    total = facts.out_size * facts.columns
    size = min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, total // FEWEST_BLOCKS))
    rows = min(facts.padded_rows, MOST_ROWS)
    most = MOST_OUTPUTS if rows <= FEW_ROWS else MOST_OUTPUTS // 2
    outputs = min(max(size // columns // LANES * LANES, LANES), most)
    if way == "sums":
        most = MOST_PART_ROWS // (facts.num_planes("sums") * facts.strip_groups) // 32 * 32
        rows = min(rows, max(most, 32))
    while True:
        blocks = Blocks(way=way, rows=rows, outputs=min(outputs, facts.out_size), columns=columns)
        needed = vmem_bytes(blocks, facts)
        if sum(needed.values()) <= VMEM_LIMIT_BYTES - VMEM_RESERVE_BYTES:
            return blocks
        if outputs > LANES and (outputs > 2 * LANES or rows <= LANES):
            outputs = outputs // 2 // LANES * LANES
        elif rows > 32:
            rows = rows // 2 // 32 * 32
        elif outputs > LANES:
            outputs = LANES
        else:
            return blocks  # `check` says what is too large


def _may_scale_weights(facts: Facts) -> bool:
    """Whether the way "weights" can do it: whole vectors of groups, and x in bfloat16 planes."""
    groups, rest = divmod(WEIGHT_COLUMNS, facts.group_columns)
    fits = rest == 0 and groups % SUBLANES == 0
    return fits and not facts.scheme.activations.endswith("_token")


def _way(facts: Facts) -> Way:
    if facts.num_groups == 1:
        return "end"
    # How often each column of a row is multiplied, times the halves of a byte.
    sums = facts.strip_groups * facts.num_planes("sums")
    weights = {1: 2, 2: 3, 3: 6}[facts.num_planes("weights")]
    many = facts.padded_rows * sums > MOST_SUM_ROWS and sums > weights + 1
    return "weights" if many and _may_scale_weights(facts) else "sums"


def _columns(facts: Facts, most: int) -> int:
    """The most columns that divide the weight's evenly and are whole steps; else all."""
    step = facts.column_step
    if facts.columns % step:
        return facts.columns
    steps = facts.columns // step
    found = [n for n in range(1, steps + 1) if steps % n == 0 and n * step <= most]
    return max(found, default=1) * step
