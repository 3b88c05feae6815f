"""Hugging Face folders: `*.safetensors` (one file, or shards with an index) beside config.json.

The format: 8 bytes of little-endian header length, a JSON header that gives each tensor's dtype,
shape and byte range, then the data. Read here directly so that only the wanted slices are touched
and nothing stays mapped. Step 6 of the walk loads weights through it; must not know any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError
from checkpoints.folder_files import read_folder_config, read_folder_tokenizer, read_json_object
from checkpoints.mapped_file import MappedFile
from checkpoints.reader import TensorInfo, TokenizerFiles

#: safetensors' dtype names and what they are in numpy.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
#: safetensors itself refuses longer headers.
MAX_HEADER_BYTES = 100_000_000


class SafetensorsFile:
    """One `.safetensors` file: its table of tensors, and reads from it."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        header, data_start = _read_header(self._file)
        for name, entry in header.items():
            if name != "__metadata__":
                info, offset = _check_entry(self._file, name, entry, data_start)
                self.tensors[name], self._offsets[name] = info, offset

    def read(self, name: str, index: Sequence[slice] | None) -> np.ndarray:
        """A copy of a tensor or of a slice of it, in its own dtype."""
        info = self.tensors[name]
        return self._file.read_array(self._offsets[name], info.shape, info.dtype, index)


class SafetensorsReader:
    """`checkpoints.reader.CheckpointReader` for Hugging Face folders.

    folder: where config.json and the tokeniser stand.
    weights: the `.safetensors` file, or the index (`*.safetensors.index.json`) of its shards.
    """

    convention = "hf"

    def __init__(self, folder: Path, weights: Path) -> None:
        self._folder = folder
        self._weights = weights
        if weights.name.endswith(".index.json"):
            self._owners = _open_shards(weights)
        else:
            file = SafetensorsFile(weights)
            self._owners = dict.fromkeys(file.tensors, file)
        self._tensors = {name: file.tensors[name] for name, file in self._owners.items()}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json, with generation_config.json under "generation_config" if there is one."""
        return read_folder_config(self._folder)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, over all shards."""
        return self._tensors

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor or a slice of it in its own dtype; raises CheckpointNotFoundError for a bad name."""
        owner = self._owners.get(name)
        if owner is None:
            raise CheckpointNotFoundError(f"{self._weights} has no tensor {name}")
        return owner.read(name, index)

    def tokenizer_files(self) -> TokenizerFiles:
        """tokenizer.json or tokenizer.model with what stands beside it."""
        return read_folder_tokenizer(self._folder)


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset at which the data begins."""
    if file.size < 8:
        raise CheckpointFormatError(f"{file.path} is truncated: {file.size} bytes")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointFormatError(
            f"{file.path} is not a safetensors file: its header would have {length} bytes"
        )
    if 8 + length > file.size:
        raise CheckpointFormatError(
            f"{file.path} is truncated: the header needs {8 + length} bytes, it has {file.size}; "
            "fetch it again"
        )
    try:
        header = json.loads(file.buffer[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(
            f"{file.path} is not a safetensors file: its header is not JSON ({error})"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointFormatError(
            f"{file.path} is not a safetensors file: its header is a {type(header).__name__}"
        )
    return header, 8 + length


def _check_entry(
    file: MappedFile, name: str, entry: object, data_start: int
) -> tuple[TensorInfo, int]:
    """The tensor's description and its offset in the file; every field is checked."""
    where = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointFormatError(f"{where} is described by {entry!r}")
    dtype = DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise CheckpointFormatError(
            f"{where} has dtype {entry.get('dtype')!r}; known are {', '.join(DTYPES)}"
        )
    shape = entry.get("shape")
    if not _is_sizes(shape) or math.prod(size or 1 for size in shape) > 2**56:
        raise CheckpointFormatError(f"{where} has shape {shape!r}")
    offsets = entry.get("data_offsets")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointFormatError(f"{where} has data_offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointFormatError(
            f"{where} has {end - begin} bytes; shape {shape} of {dtype.name} needs {needed}"
        )
    if data_start + end > file.size:
        raise CheckpointFormatError(
            f"{file.path} is truncated: tensor {name!r} ends at byte {data_start + end}, the file "
            f"has {file.size}; fetch it again"
        )
    return TensorInfo(name=name, shape=tuple(shape), dtype=dtype.name), data_start + begin


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**40 for item in value
    )


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    """Opens every shard that the index names and checks that each holds what it should."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise CheckpointFormatError(f"{index} has no weight_map from tensors to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise CheckpointFormatError(f"{index} names {shard}, which is missing; fetch it again")
        files[shard] = SafetensorsFile(path)
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise CheckpointFormatError(f"{index} says that {shard} holds {name}; it does not")
    return {name: files[shard] for name, shard in weight_map.items()}
