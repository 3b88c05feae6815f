"""A model file mapped into memory, with bounds checks and bounded resident pages.

Read by the safetensors and GGUF readers (step 6 of the walk gets its weights through them).
Pages that were copied out are handed back at once, so that streaming a file of any size through
this module does not make the process grow by that file. Must not know of tensors' names.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError

#: Bytes that are copied between two releases of mapped pages.
COPY_BYTES = 16 * 2**20


class MappedFile:
    """A read-only file. Raises CheckpointNotFoundError or, if it is empty, CheckpointFormatError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CheckpointFormatError(f"{path} is empty; fetch it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{path} does not exist") from None
        except OSError as error:
            raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from None

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file as a buffer; reading from it faults pages in as needed."""
        return self._map

    def view(
        self, offset: int, shape: Sequence[int], dtype: npt.DTypeLike
    ) -> npt.NDArray[np.generic]:
        """An array on top of the file, without a copy; the caller has checked the bounds."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        assert offset + count * kind.itemsize <= self.size
        return np.ndarray(tuple(shape), dtype=kind, buffer=self._map, offset=offset)

    def release(self, offset: int, count: int) -> None:
        """Lets the kernel take the mapped pages of a range back (it may keep them in its cache)."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = offset - offset % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, min(offset + count, self.size) - start)

    def read_array(
        self,
        offset: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        index: Sequence[slice] | None = None,
    ) -> npt.NDArray[np.generic]:
        """A copy of (a slice of) the row-major array at `offset`, in native byte order.

        dtype: any numpy or ml_dtypes type. index: one slice per leading axis, as in numpy.
        """
        kind = np.dtype(dtype)
        raw = np.dtype(f"<u{kind.itemsize}")  # plain integers may stand at unaligned offsets
        source = self.view(offset, shape, raw)
        slices = full_index(shape, index)
        if not shape:
            return source.copy().view(kind)
        out = np.empty([len(range(*s.indices(n))) for s, n in zip(slices, shape, strict=True)], raw)
        row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * kind.itemsize)
        rows = range(*slices[0].indices(shape[0]))
        for first, part in split_rows(rows, max(1, COPY_BYTES // row_bytes)):
            out[first : first + len(part)] = source[(as_slice(part), *slices[1:])]
            low, high = min(part[0], part[-1]), max(part[0], part[-1]) + 1
            self.release(offset + low * row_bytes, (high - low) * row_bytes)
        return out.view(kind)


def full_index(shape: tuple[int, ...], index: Sequence[slice] | None) -> tuple[slice, ...]:
    """`index` with a full slice for each axis that it leaves out."""
    given = tuple(index or ())
    assert len(given) <= len(shape), f"{len(given)} slices for a tensor of shape {shape}"
    return given + (slice(None),) * (len(shape) - len(given))


def split_rows(rows: range, most: int) -> Iterator[tuple[int, range]]:
    """Parts of at most `most` rows, each with the position of its first row in the result."""
    for first in range(0, len(rows), most):
        yield first, rows[first : first + most]


def as_slice(rows: range) -> slice:
    """The slice that selects a non-empty range; a descending one may end before row 0."""
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)
