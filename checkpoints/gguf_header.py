"""The header of a GGUF file: metadata and the table of tensors, without touching tensor data.

The `gguf` package gives the numbers of the format (types, block sizes) and the block arithmetic;
its own reader makes several numpy objects per vocabulary entry, which takes half a minute for
262,144 entries, so the header is walked here: long arrays are skipped and decoded when asked for.
Every read is checked against the file's size. Layout: llama.cpp's GGUF specification, version 3.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from checkpoints.errors import CheckpointFormatError
from checkpoints.mapped_file import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
#: numpy's name of every metadata value that has a fixed size.
SCALARS: Mapping[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """A metadata array that was skipped: `count` values of `kind`, the first at `offset`."""

    kind: int
    count: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One entry of the tensor table. shape is numpy's order (slowest axis first); offset in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufHeader:
    """Metadata (scalars and texts decoded, arrays as `GgufArray`) and tensors of a GGUF file.

    Raises CheckpointFormatError for anything that contradicts the format or the file's size.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._offset = 0
        self.metadata: dict[str, Any] = {}
        if bytes(file.buffer[:4]) != MAGIC:
            raise CheckpointFormatError(
                f"{file.path} is not a GGUF file: it does not begin with GGUF"
            )
        self._offset = 4
        self._check_version(self._number(_U32))
        num_tensors, num_fields = self._number(_U64), self._number(_U64)
        for _ in range(num_fields):
            self._read_field()
        self.tensors = self._read_tensors(num_tensors)

    def array(self, key: str) -> list[Any]:
        """The values of a metadata array; texts as str."""
        entry = self.metadata[key]
        assert isinstance(entry, GgufArray)
        self._offset = entry.offset
        if entry.kind == GGUFValueType.STRING:
            return self._texts(entry.count)
        dtype = np.dtype(SCALARS[entry.kind])
        start = self._take(entry.count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._file.buffer, dtype, entry.count, start).tolist()
        return values

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise CheckpointFormatError(
                f"{self._file.path} is big-endian; convert it to little-endian"
            )
        raise CheckpointFormatError(
            f"{self._file.path} is GGUF version {version}; versions 2 and 3 can be read"
        )

    def _take(self, count: int) -> int:
        """Moves past `count` bytes and returns where they begin."""
        start = self._offset
        if start + count > self._file.size:
            raise CheckpointFormatError(
                f"{self._file.path} is truncated or damaged: its header goes on at byte {start} with "
                f"{count} bytes, the file has {self._file.size}; fetch it again"
            )
        self._offset = start + count
        return start

    def _number(self, layout: struct.Struct) -> int:
        return int(layout.unpack_from(self._file.buffer, self._take(layout.size))[0])

    def _text(self) -> str:
        count = self._number(_U64)
        start = self._take(count)
        try:
            return self._file.buffer[start : start + count].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointFormatError(
                f"{self._file.path} is damaged: a text at byte {start} is not UTF-8 ({error.reason})"
            ) from None

    def _texts(self, count: int) -> list[str]:
        """`count` texts that were skipped before, hence within the file; bare as `_skip_texts`."""
        buffer, unpack, offset = self._file.buffer, _U64.unpack_from, self._offset
        texts = []
        try:
            for _ in range(count):
                begin = offset + 8
                offset = begin + unpack(buffer, offset)[0]
                texts.append(buffer[begin:offset].decode())
        except UnicodeDecodeError as error:
            raise CheckpointFormatError(
                f"{self._file.path} is damaged: a text at byte {begin} is not UTF-8 ({error.reason})"
            ) from None
        return texts

    def _read_field(self) -> None:
        key = self._text()
        kind = self._number(_U32)
        if key in self.metadata:
            raise CheckpointFormatError(f"{self._file.path} is damaged: it has {key!r} twice")
        if kind == GGUFValueType.STRING:
            self.metadata[key] = self._text()
        elif kind == GGUFValueType.ARRAY:
            self.metadata[key] = self._skip_array(key)
        elif kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            start = self._take(dtype.itemsize)
            self.metadata[key] = np.frombuffer(self._file.buffer, dtype, 1, start)[0].item()
        else:
            raise CheckpointFormatError(f"{self._file.path} is damaged: {key!r} has type {kind}")

    def _skip_array(self, key: str) -> GgufArray:
        kind, count = self._number(_U32), self._number(_U64)
        entry = GgufArray(kind=kind, count=count, offset=self._offset)
        if kind == GGUFValueType.STRING:
            self._skip_texts(count)
        elif kind in SCALARS:
            self._take(count * np.dtype(SCALARS[kind]).itemsize)
        else:
            raise CheckpointFormatError(
                f"{self._file.path}: array {key!r} has items of type {kind}"
            )
        return entry

    def _skip_texts(self, count: int) -> None:
        """Moves past `count` texts; the loop is kept bare because vocabularies are long."""
        buffer, unpack, offset = self._file.buffer, _U64.unpack_from, self._offset
        try:
            for _ in range(count):
                offset += 8 + unpack(buffer, offset)[0]
        except (struct.error, OverflowError):
            offset = self._file.size + 1
        self._take(offset - self._offset)

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, num_dims = self._text(), self._number(_U32)
            if num_dims > MAX_DIMENSIONS:
                raise CheckpointFormatError(
                    f"{self._file.path} is damaged: tensor {name!r} has {num_dims} dimensions"
                )
            shape = tuple(reversed([self._number(_U64) for _ in range(num_dims)]))
            entries.append((name, shape, self._number(_U32), self._number(_U64)))
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointFormatError(f"{self._file.path}: general.alignment is {alignment!r}")
        data_start = -(-self._offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise CheckpointFormatError(f"{self._file.path} is damaged: it has {name!r} twice")
            tensors[name] = self._check_tensor(name, shape, kind, data_start + offset)
        return tensors

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        where = f"{self._file.path}: tensor {name!r}"
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointFormatError(
                f"{where} has the unknown format {kind}; the file is damaged or too new"
            ) from None
        block_size, block_bytes = GGML_QUANT_SIZES[known]
        if not math.prod(shape) or not shape or shape[-1] % block_size:
            raise CheckpointFormatError(
                f"{where} has shape {shape}, which {known.name} blocks of {block_size} do not divide"
            )
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > self._file.size:
            raise CheckpointFormatError(
                f"{self._file.path} is truncated: tensor {name!r} ends at byte {offset + num_bytes}, "
                f"the file has {self._file.size}; fetch it again"
            )
        return GgufTensor(name=name, shape=shape, kind=known, offset=offset, num_bytes=num_bytes)
