"""One device's part of one parameter, in its final dtype and layout: read from a file, or random."""

from __future__ import annotations

import numpy as np

from checkpoints.reader import CheckpointReader
from jaxserve.models.sources import Source

#: How much of a tensor is read and converted at a time.
BLOCK_BYTES = 32 * 2**20


def read_shard(
    reader: CheckpointReader, source: Source, bounds: tuple[tuple[int, int], ...], dtype: np.dtype
) -> np.ndarray:
    """The part of a parameter within `bounds` (start and end per axis), in its final dtype."""
    (start, stop), columns = bounds[0], tuple(slice(*bound) for bound in bounds[1:])
    row_bytes = 4 * int(np.prod(source.shape[1:], dtype=np.int64))
    unit = source.interleaved_head or 1
    assert start % unit == 0, (source, bounds)
    assert stop % unit == 0, (source, bounds)
    step = max(1, BLOCK_BYTES // (row_bytes * unit)) * unit

    def read_rows(begin: int, end: int) -> np.ndarray:
        rows = slice(source.first_row + begin, source.first_row + end)
        block = reader.read(source.name, (rows, *columns))
        if source.interleaved_head is not None:
            block = separate_pairs(block, source.interleaved_head)
        if source.add:
            block = block.astype(np.float32) + np.float32(source.add)
        return block.astype(dtype, copy=False)

    if stop - start <= step:
        return read_rows(start, stop)
    out = np.empty(tuple(end - begin for begin, end in bounds), dtype)
    for row in range(start, stop, step):
        end = min(row + step, stop)
        out[row - start : end - start] = read_rows(row, end)
    return out


def separate_pairs(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of whole heads [heads * H, ...], from pair order (0, H/2, 1, ...) to halves."""
    pairs = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def random_shard(
    table: np.ndarray, offset: int, width: int, rows: range, columns: range, dtype: np.dtype
) -> np.ndarray:
    """Elements [rows, columns] of a matrix of `width` columns that runs through the table."""
    out = np.empty((len(rows), len(columns)), dtype)
    across = np.arange(columns.start, columns.stop)
    for number, row in enumerate(rows):
        out[number] = np.take(table, offset + row * width + across, mode="wrap")
    return out
