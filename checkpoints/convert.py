"""Turns any checkpoint that can be read into an Orbax checkpoint from which serving starts.

Behind `jaxserve convert SRC DST`. Imports the Orbax writer, hence jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from checkpoints.errors import CheckpointError, CheckpointNotFoundError
from checkpoints.orbax_manifest import numpy_dtype
from checkpoints.orbax_writer import write_checkpoint
from checkpoints.reader import CheckpointReader

#: What `dtype` may be; only floating-point tensors are converted.
DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: CheckpointReader, folder: Path, *, dtype: str | None = None, progress: bool = True
) -> None:
    """Writes `source` into the new folder, tensor by tensor, with its config and tokeniser.

    Names and convention stay the source's; block formats are dequantised to float32.
    dtype: convert floating-point tensors to it, None to keep theirs.
    Raises CheckpointError if the folder is not empty or cannot be written, or if dtype is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    try:
        tokenizer = source.tokenizer_files()
    except CheckpointNotFoundError:
        tokenizer = None
    write_checkpoint(
        folder,
        convention=source.convention,
        config=source.config,
        tensors=_read_all(source, dtype, progress),
        tokenizer=tokenizer,
    )


def _read_all(
    source: CheckpointReader, dtype: str | None, progress: bool
) -> Iterator[tuple[str, np.ndarray]]:
    bar = tqdm(source.tensors.items(), desc="convert", unit="tensor", disable=not progress)
    for name, info in bar:
        array = source.read(name)
        assert array.shape == info.shape
        if dtype is not None and _is_float(array.dtype):
            array = array.astype(numpy_dtype(dtype), copy=False)
        yield name, array


def _is_float(dtype: np.dtype[np.generic]) -> bool:
    """True for numpy's and ml_dtypes' floating-point types."""
    return np.issubdtype(dtype, np.floating) or dtype.name.startswith(("bfloat", "float"))
