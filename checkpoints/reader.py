"""What every reader of model files offers, whatever the format.

Readers know files, not models: names and shapes are those of the file's own convention
(Hugging Face names for safetensors and Orbax, llama.cpp names for GGUF).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a checkpoint. dtype is a numpy (or ml_dtypes) name or a GGUF format such as "Q4_1"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokeniser as it was found; exactly one of the first three is set.

    tokenizer_json: the file's text. sentencepiece_model: its bytes. gguf_vocab: the `tokenizer.ggml.*`
    fields of a GGUF file without that prefix. chat_template: Jinja text, None if the model has none.
    special: bos_token, eos_token, add_bos_token and so on, as in tokenizer_config.json.
    """

    tokenizer_json: str | None = None
    sentencepiece_model: bytes | None = None
    gguf_vocab: Mapping[str, Any] | None = None
    chat_template: str | None = None
    special: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointReader(Protocol):
    """An open checkpoint. All errors are `checkpoints.errors.CheckpointError`s that name the file."""

    #: "hf" (config.json and Hugging Face tensor names) or "gguf" (metadata and llama.cpp names).
    convention: str

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as a dict (with generation_config.json under "generation_config"), or GGUF metadata."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name; reading this touches no tensor data."""
        ...

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """One tensor or a slice of it, dequantised: float32 for GGUF formats, else its own dtype.

        Reads no more of the file than the slice needs (whole quantisation blocks, whole rows).
        """
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokeniser that came with the weights; raises CheckpointNotFoundError if there is none."""
        ...
