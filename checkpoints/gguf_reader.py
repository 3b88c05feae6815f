"""GGUF files: metadata, vocabulary and tensors, dequantised with the `gguf` package.

Step 6 of the walk loads weights through it, step 2 its vocabulary. Imports no jax; knows block
formats but no model: tensor names stay llama.cpp's and shapes are in numpy's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError
from checkpoints.gguf_header import GgufArray, GgufHeader, GgufTensor
from checkpoints.mapped_file import MappedFile, full_index, split_rows
from checkpoints.reader import TensorInfo, TokenizerFiles

VOCAB_PREFIX = "tokenizer.ggml."
#: Formats that are plain numbers, not blocks.
PLAIN: Mapping[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
#: Weights that are dequantised at once: small enough for the processor's cache.
DEQUANTISE_ELEMENTS = 2**17


class GgufReader:
    """`checkpoints.reader.CheckpointReader` for one GGUF file."""

    convention = "gguf"

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self._header = GgufHeader(self._file)
        parts = self._header.metadata.get("split.count", 1)
        if parts != 1:
            raise CheckpointFormatError(
                f"{path} is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`"
            )
        self._tensors = {
            name: TensorInfo(name=name, shape=tensor.shape, dtype=_dtype_name(tensor.kind))
            for name, tensor in self._header.tensors.items()
        }

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The metadata; the vocabulary's arrays are left out (`tokenizer_files` has them)."""
        config: dict[str, Any] = {}
        for key, value in self._header.metadata.items():
            if not isinstance(value, GgufArray):
                config[key] = value
            elif not key.startswith(VOCAB_PREFIX):
                config[key] = self._header.array(key)
        return config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name; dtype is a numpy name or the name of a block format."""
        return self._tensors

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor or a slice of it: float32 for block formats, plain numbers as they are.

        Only the wanted rows are read and dequantised, each as a whole.
        """
        tensor = self._header.tensors.get(name)
        if tensor is None:
            raise CheckpointNotFoundError(f"{self._file.path} has no tensor {name}")
        if tensor.kind in PLAIN:
            return self._file.read_array(tensor.offset, tensor.shape, PLAIN[tensor.kind], index)
        return self._read_blocks(tensor, full_index(tensor.shape, index))

    def tokenizer_files(self) -> TokenizerFiles:
        """The vocabulary in `tokenizer.ggml.*`, the chat template and the special tokens."""
        metadata = self._header.metadata
        if VOCAB_PREFIX + "tokens" not in metadata:
            raise CheckpointNotFoundError(f"{self._file.path} holds no vocabulary")
        vocab = {
            key.removeprefix(VOCAB_PREFIX): (
                self._header.array(key) if isinstance(value, GgufArray) else value
            )
            for key, value in metadata.items()
            if key.startswith(VOCAB_PREFIX)
        }
        tokens = vocab["tokens"]
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise CheckpointFormatError(f"{self._file.path}: {VOCAB_PREFIX}tokens holds no texts")
        template = metadata.get("tokenizer.chat_template")
        return TokenizerFiles(
            gguf_vocab=vocab,
            chat_template=template if isinstance(template, str) else None,
            special=_special_tokens(vocab),
        )

    def _read_blocks(
        self, tensor: GgufTensor, slices: tuple[slice, ...]
    ) -> npt.NDArray[np.float32]:
        """Dequantises row by row, in parts, so that no second copy of the tensor exists."""
        *lead, width = tensor.shape
        num_rows = int(np.prod(lead, dtype=np.int64))
        row_bytes = tensor.num_bytes // max(1, num_rows)
        rows = np.arange(num_rows).reshape(lead)[slices[:-1]]
        wanted, flat = slices[-1], rows.ravel()
        out = np.empty((flat.size, len(range(*wanted.indices(width)))), np.float32)
        source = self._file.view(tensor.offset, (num_rows, row_bytes), np.uint8)
        for first, part in split_rows(range(flat.size), max(1, DEQUANTISE_ELEMENTS // width)):
            chosen = flat[part.start : part.stop]
            values = _dequantise(source[_run_or_list(chosen)], tensor, self._file.path)
            out[first : first + len(part)] = values.reshape(len(part), width)[:, wanted]
            low, high = int(chosen.min()), int(chosen.max()) + 1
            self._file.release(tensor.offset + low * row_bytes, (high - low) * row_bytes)
        return out.reshape(*rows.shape, out.shape[1])


def _dequantise(
    blocks: npt.NDArray[Any], tensor: GgufTensor, path: Path
) -> npt.NDArray[np.float32]:
    """Blocks are independent of one another, so that all go to `gguf` as a single row."""
    try:
        with np.errstate(invalid="ignore", over="ignore"):  # scales of a damaged file
            values: npt.NDArray[np.float32] = dequantize(blocks.reshape(1, -1), tensor.kind)
    except NotImplementedError:
        raise CheckpointFormatError(
            f"{path}: tensor {tensor.name} has the format {tensor.kind.name}, which cannot be "
            "dequantised; use a file with another quantisation"
        ) from None
    return values


def _run_or_list(rows: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """A slice (no copy) if the rows follow one another."""
    if rows.size and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _dtype_name(kind: GGMLQuantizationType) -> str:
    assert kind in GGML_QUANT_SIZES
    return PLAIN[kind].name if kind in PLAIN else str(kind.name)


def _special_tokens(vocab: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token and so on as texts, the ids, and the add_..._token flags."""
    names = {"unknown": "unk", "padding": "pad", "seperator": "sep", "separator": "sep"}
    tokens = vocab["tokens"]
    special: dict[str, Any] = {}
    for key, value in vocab.items():
        if key.endswith("_token_id") and isinstance(value, int):
            name = key.removesuffix("_token_id")
            name = names.get(name, name)
            special[f"{name}_token_id"] = value
            if 0 <= value < len(tokens):
                special[f"{name}_token"] = tokens[value]
        elif key.startswith("add_") and isinstance(value, bool):
            special[key] = value
    return special
