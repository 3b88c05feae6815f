"""What stands in `jaxserve.json`, the table of contents of our Orbax checkpoints.

    jaxserve.json            this manifest: convention, format version, every tensor's place
    config.json              as the source had it (GGUF: its metadata)
    tokenizer files          as `checkpoints.folder_files` reads them
    weights/group_00000/     an Orbax checkpoint of a flat dict {tensor name: array}
    weights/group_00001/     ...

The groups exist because Orbax wants all arrays of a checkpoint at once: with groups of bounded
size a model of any size is written and restored part by part. Imports neither jax nor Orbax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from checkpoints.errors import CheckpointFormatError
from checkpoints.folder_files import read_text
from checkpoints.kinds import MANIFEST
from checkpoints.reader import TensorInfo

FORMAT = "jaxserve-orbax"
VERSION = 1
WEIGHTS = "weights"


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its shape, the numpy or ml_dtypes name of its dtype, the group that holds it."""

    shape: list[int]
    dtype: str
    group: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file; `convention` as in `CheckpointReader`."""

    format: str
    version: int
    convention: str
    tensors: dict[str, TensorEntry]

    def infos(self) -> dict[str, TensorInfo]:
        """The table as readers give it."""
        return {
            name: TensorInfo(name=name, shape=tuple(entry.shape), dtype=entry.dtype)
            for name, entry in self.tensors.items()
        }


def group_folder(folder: Path, group: int) -> Path:
    """Where a group's Orbax checkpoint stands. Orbax wants absolute paths."""
    return folder.absolute() / WEIGHTS / f"group_{group:05d}"


def make_manifest(convention: str, tensors: Mapping[str, TensorEntry]) -> Manifest:
    """A manifest of the current version."""
    return Manifest(format=FORMAT, version=VERSION, convention=convention, tensors=dict(tensors))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest for people to read; it comes last, so that it marks a whole checkpoint."""
    value = msgspec.to_builtins(manifest)
    (folder / MANIFEST).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointFormatError if the manifest is damaged or of a later version."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(read_text(path), type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointFormatError(f"{path} is damaged: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise CheckpointFormatError(
            f"{path} has format {manifest.format!r} version {manifest.version}; this program reads "
            f"{FORMAT!r} version {VERSION}; convert the model again"
        )
    if manifest.convention not in ("hf", "gguf"):
        raise CheckpointFormatError(f"{path} has the unknown convention {manifest.convention!r}")
    for name, entry in manifest.tensors.items():
        if not _is_dtype(entry.dtype) or min(entry.shape, default=1) < 1:
            raise CheckpointFormatError(f"{path}: tensor {name} is {entry.dtype} {entry.shape}")
        if not group_folder(folder, entry.group).is_dir():
            raise CheckpointFormatError(
                f"{path} names group {entry.group} for {name}, which is missing; convert again"
            )
    return manifest


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a numpy or ml_dtypes name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _is_dtype(name: str) -> bool:
    try:
        numpy_dtype(name)
    except TypeError:
        return False
    return True
