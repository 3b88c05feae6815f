"""Writes a checkpoint with Orbax: weights, config and tokeniser in one folder, all or nothing.

Used by `checkpoints.convert` and by what trains the small model. Imports Orbax, hence jax.
Peak host memory: about three times one group (`GROUP_BYTES`, or one tensor if that is larger): the
group and what Orbax holds while it compresses it. Measured: 415 MB while converting a model of
513 MB whose largest tensor has 108 MB.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from checkpoints.errors import CheckpointError, CheckpointFormatError
from checkpoints.folder_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    GGUF_VOCAB,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
)
from checkpoints.orbax_manifest import TensorEntry, group_folder, make_manifest, write_manifest
from checkpoints.reader import TokenizerFiles

GROUP_BYTES = 128 * 2**20
#: Size of the pieces that a reader of a slice must read whole.
CHUNK_BYTES = 8 * 2**20


def write_checkpoint(
    folder: Path,
    *,
    convention: str,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: TokenizerFiles | None,
) -> None:
    """Writes a new checkpoint folder; `tensors` is consumed one by one.

    Raises CheckpointError if the folder exists and is not empty, or cannot be written. Nothing is
    left behind after an error, and nothing that looks whole after a kill.
    """
    with _new_folder(folder) as partial:
        _write_json(partial / CONFIG, {k: v for k, v in config.items() if k != "generation_config"})
        if "generation_config" in config:
            _write_json(partial / GENERATION_CONFIG, config["generation_config"])
        if tokenizer is not None:
            write_tokenizer_files(partial, tokenizer)
        entries = _write_groups(partial, tensors)
        write_manifest(partial, make_manifest(convention, entries))


def write_tokenizer_files(folder: Path, files: TokenizerFiles) -> None:
    """Writes what `checkpoints.folder_files.read_folder_tokenizer` reads back, without loss."""
    if files.tokenizer_json is not None:
        (folder / TOKENIZER_JSON).write_bytes(files.tokenizer_json.encode("utf-8"))
    if files.sentencepiece_model is not None:
        (folder / TOKENIZER_MODEL).write_bytes(files.sentencepiece_model)
    if files.gguf_vocab is not None:
        _write_json(folder / GGUF_VOCAB, files.gguf_vocab)
    if files.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_bytes(files.chat_template.encode("utf-8"))
    _write_json(folder / TOKENIZER_CONFIG, files.special)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name at the end."""
    partial = folder.absolute().parent / f".{folder.name}.partial"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{folder} exists already; choose another name or remove it first"
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_groups(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]]
) -> dict[str, TensorEntry]:
    """Saves the tensors in groups of bounded size; returns the manifest's table."""
    entries: dict[str, TensorEntry] = {}
    group: dict[str, np.ndarray] = {}
    number = 0
    for name, array in tensors:
        if array.size == 0:
            raise CheckpointFormatError(
                f"tensor {name} has shape {array.shape}; it cannot be empty"
            )
        if group and sum(a.nbytes for a in group.values()) + array.nbytes > GROUP_BYTES:
            _save_group(group_folder(folder, number), group)
            group, number = {}, number + 1
        group[name] = array
        entries[name] = TensorEntry(list(array.shape), array.dtype.name, number)
    if group:
        _save_group(group_folder(folder, number), group)
    return entries


def _save_group(path: Path, group: dict[str, np.ndarray]) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in group}
        checkpointer.save(path, args=ocp.args.PyTreeSave(group, save_args=save_args))
    for note in path.rglob("commit_success.txt"):
        # Orbax notes the absolute path here, which is of no use to those who get the folder.
        note.write_text("Checkpoint commit was successful\n", encoding="utf-8")
