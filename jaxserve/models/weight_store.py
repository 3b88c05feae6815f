"""Quantised weights on disk as a device holds them, so that a second start only reads (before step 1).

Dequantising a file's blocks, quantising and packing take seconds; their result is one file here per
model, form of its weights and version of the code that made it. A file is written whole or not at
all, and read with its checksums: one that does not fit is made again, never trusted. For processes
with one device. Must not know what the arrays mean.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import checkpoints
from checkpoints.kinds import find_model
from pallas_kernels import quantized_matmul

logger = logging.getLogger("jaxserve.models")

#: Models that are kept; the one unused for longest goes when a new one is stored.
MAX_MODELS = 4
#: Arrays begin at multiples of this, so that jax can use them where they lie.
ALIGNMENT = 64
#: Of a file of weights: beginning and end are part of its identity.
_EDGE_BYTES = 2**20
_MAGIC = b"jaxserve weights\n"
_THREADS = 2


class _Entry(msgspec.Struct, frozen=True):
    """One array; offset counts from the first array's place."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    checksum: int


class WeightStore:
    """The place of one model's arrays.

    model: its file or folder. facts: everything that shapes the arrays beside the model's files and
    our source; only their repr counts.
    """

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, facts: Sequence[object]) -> None:
        versions = (jax.__version__, np.__version__, _source_digest())
        parts = [*versions, *map(repr, _identity(model)), *map(repr, facts)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self._path = folder / f"{digest}.weights"

    def get(self) -> dict[str, np.ndarray] | None:
        """All arrays by path, in one piece of memory, aligned; None if they must be made."""
        try:
            with self._path.open("rb") as file:
                found = _read(file.fileno())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            logger.warning("stored weights %s cannot be used (%s)", self._path, error)
            return None
        os.utime(self._path)
        return found

    def put(self, arrays: Mapping[str, jax.Array]) -> None:
        """Keeps the arrays; where that cannot be done, says so and goes on."""
        folder = self._path.parent
        partial = self._path.with_suffix(f".{os.getpid()}.part")
        size = sum(array.nbytes for array in arrays.values())
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if shutil.disk_usage(folder).free < 2 * size:
                raise OSError(f"{size / 1e6:.0f} MB would fill more than half of what is free")
            _write(partial, arrays)
            partial.replace(self._path)
            _forget_old(folder)
        except OSError as error:
            logger.warning("quantised weights could not be stored in %s: %s", folder, error)
            with contextlib.suppress(OSError):
                partial.unlink()


def _read(descriptor: int) -> dict[str, np.ndarray]:
    """Raises ValueError for whatever is not as it was written."""
    magic, size, checksum = _MAGIC, 8, 4
    head = os.pread(descriptor, len(magic) + size + checksum, 0)
    if len(head) < len(magic) + size + checksum or not head.startswith(magic):
        raise ValueError("it is not a file of weights")
    length = int.from_bytes(head[len(magic) : len(magic) + size], "little")
    total = os.fstat(descriptor).st_size
    if length > total:
        raise ValueError("it ends early")
    table = os.pread(descriptor, length, len(head))
    if zlib.crc32(table) != int.from_bytes(head[-checksum:], "little"):
        raise ValueError("its table is damaged")
    entries = msgspec.json.decode(table, type=list[_Entry])
    start = _aligned(len(head) + length)
    data = _aligned_bytes(total - start)
    _fill(descriptor, data, start)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as executor:
        return dict(executor.map(lambda entry: (entry.path, _array(data, entry)), entries))


def _fill(descriptor: int, data: np.ndarray, start: int) -> None:
    view, done = data.data, 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + 2**30]], start + done)
        if count == 0:
            raise ValueError("it ends early")
        done += count


def _array(data: np.ndarray, entry: _Entry) -> np.ndarray:
    part = data[entry.offset : entry.offset + entry.size]
    if part.size != entry.size or zlib.crc32(part.data) != entry.checksum:
        raise ValueError(f"{entry.path} is damaged")
    return part.view(jnp.dtype(entry.dtype)).reshape(entry.shape)


def _write(path: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    entries, offset = [], 0
    for name, array in arrays.items():
        flat = _bytes(array)
        entries.append(
            _Entry(name, array.dtype.name, array.shape, offset, flat.size, zlib.crc32(flat.data))
        )
        offset = _aligned(offset + flat.size)
    table = msgspec.json.encode(entries)
    checksum = zlib.crc32(table).to_bytes(4, "little")
    head = _MAGIC + len(table).to_bytes(8, "little") + checksum + table
    start = _aligned(len(head))
    with path.open("wb") as file:
        file.write(head)
        for entry, array in zip(entries, arrays.values(), strict=True):
            file.seek(start + entry.offset)
            file.write(_bytes(array).data)
        file.truncate(start + offset)
        file.flush()
        os.fsync(file.fileno())


def _bytes(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _aligned_bytes(size: int) -> np.ndarray:
    room = np.empty(size + ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + size]


def _forget_old(folder: pathlib.Path) -> None:
    files = sorted(folder.glob("*.weights"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MAX_MODELS]:
        path.unlink(missing_ok=True)


def _identity(model: pathlib.Path) -> Iterator[tuple[str, int, int, str]]:
    """Name, size, time and a digest of both ends of every file that weights may come from."""
    found = find_model(model)
    files = [found.weights] if found.kind == "gguf" else sorted(found.folder.rglob("*"))
    for path in files:
        if not path.is_file():
            continue
        status = path.stat()
        with path.open("rb") as file:
            edges = file.read(_EDGE_BYTES)
            file.seek(max(0, status.st_size - _EDGE_BYTES))
            edges += file.read(_EDGE_BYTES)
        yield path.name, status.st_size, status.st_mtime_ns, hashlib.sha256(edges).hexdigest()


def _source_digest() -> str:
    """Of the code that turns files into these arrays."""
    ours = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    roots = (
        pathlib.Path(str(checkpoints.__file__)).parent,
        pathlib.Path(str(quantized_matmul.__file__)).parent,
        ours / "layers",
        ours / "models",
        ours / "quantization",
    )
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
