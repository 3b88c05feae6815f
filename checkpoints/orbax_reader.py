"""Reads the Orbax checkpoints that `checkpoints.orbax_writer` writes.

Step 6 of the walk restores weights with it straight into their shardings. Imports Orbax, hence
jax. `read` goes to the same arrays through TensorStore, which Orbax writes with, because Orbax
itself restores whole arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError
from checkpoints.folder_files import read_folder_config, read_folder_tokenizer
from checkpoints.mapped_file import full_index
from checkpoints.orbax_manifest import group_folder, numpy_dtype, read_manifest
from checkpoints.reader import TensorInfo, TokenizerFiles


class OrbaxReader:
    """`checkpoints.reader.CheckpointReader` for our Orbax folders, with `restore` for whole models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._tensors = self._manifest.infos()
        self.convention = self._manifest.convention

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The source's config: config.json, or GGUF metadata."""
        return read_folder_config(self._folder)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, from the manifest."""
        return self._tensors

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokeniser that was written with the weights."""
        return read_folder_tokenizer(self._folder)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor or a slice of it in its stored dtype; reads the chunks that the slice touches."""
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointNotFoundError(f"{self._folder} has no tensor {name}")
        wanted = [
            range(*part.indices(size))
            for part, size in zip(full_index(info.shape, index), info.shape, strict=True)
        ]
        if not all(wanted):
            return np.empty([len(rows) for rows in wanted], numpy_dtype(info.dtype))
        try:
            stored = ts.open(self._spec(name), open=True, read=True).result()
            self._check_stored(info, tuple(stored.shape), stored.dtype.numpy_dtype)
            lows = [min(rows[0], rows[-1]) for rows in wanted]
            box = tuple(
                slice(low, max(rows[0], rows[-1]) + 1)
                for low, rows in zip(lows, wanted, strict=True)
            )
            array = np.asarray(stored[box].read().result()) if box else stored.read().result()
        except (ValueError, OSError, RuntimeError) as error:
            raise self._damaged(name, error) from None
        # a box of consecutive rows was read; steps and reversed order are numpy's business
        picked: np.ndarray = array[tuple(slice(None, None, rows.step) for rows in wanted)]
        return picked

    def restore(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Restores the named tensors straight into the shardings and dtypes that are asked for.

        abstract: name to shape (the stored one), dtype (converted on the way) and sharding (None:
        the default device). Group by group, so that the extra host memory is bounded.
        Raises CheckpointFormatError for an unknown name, another shape or damaged files.
        """
        groups: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}
        for name, wanted in abstract.items():
            entry = self._manifest.tensors.get(name)
            if entry is None:
                raise CheckpointFormatError(f"{self._folder} has no tensor {name}")
            if tuple(entry.shape) != tuple(wanted.shape):
                raise CheckpointFormatError(
                    f"{self._folder}: tensor {name} has shape {tuple(entry.shape)}, "
                    f"{tuple(wanted.shape)} was expected"
                )
            groups.setdefault(entry.group, {})[name] = wanted
        arrays: dict[str, jax.Array] = {}
        for group, members in groups.items():
            arrays.update(self._restore_group(group, members))
        return {name: arrays[name] for name in abstract}

    def _restore_group(
        self, group: int, members: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=wanted.sharding or default, dtype=wanted.dtype)
            for name, wanted in members.items()
        }
        args = ocp.args.PyTreeRestore(
            item=dict(members), restore_args=restore_args, partial_restore=True
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                restored: dict[str, jax.Array] = checkpointer.restore(
                    group_folder(self._folder, group), args=args
                )
        except (ValueError, OSError, RuntimeError, KeyError, TypeError) as error:
            raise self._damaged(f"group {group}", error) from error
        for name in members:  # Orbax hands the abstract leaf back for what it does not find
            if not isinstance(restored.get(name), jax.Array):
                raise self._damaged(name, KeyError(f"not in group {group}"))
        return restored

    def _spec(self, name: str) -> dict[str, Any]:
        """TensorStore's description of one array inside an Orbax checkpoint."""
        base = f"file://{group_folder(self._folder, self._manifest.tensors[name].group)}/"
        return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}

    def _check_stored(self, info: TensorInfo, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if shape != info.shape or np.dtype(dtype) != numpy_dtype(info.dtype):
            raise CheckpointFormatError(
                f"{self._folder}: tensor {info.name} is stored as {dtype} {shape}, the manifest says "
                f"{info.dtype} {info.shape}; convert the model again"
            )

    def _damaged(self, what: str, error: Exception) -> CheckpointFormatError:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        first = first.split(" [tensorstore_spec=")[0][:300]
        return CheckpointFormatError(f"{self._folder} is damaged: {what} cannot be read ({first})")
