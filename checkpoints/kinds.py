"""Which kind of model a path holds, told by its content: a step before any reader is chosen.

Imports neither jax nor a reader, so that front-end workers can use it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError

#: Our own checkpoints carry this file; it is written last.
MANIFEST = "jaxserve.json"
GGUF_MAGIC = b"GGUF"
EXPECTED = (
    "expected a GGUF file, a folder with config.json and *.safetensors, or a folder written by "
    "`jaxserve convert`"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """kind: "safetensors", "gguf" or "orbax". folder: where config and tokeniser stand.

    weights: the GGUF file, the safetensors file or index, or the Orbax folder itself.
    """

    kind: str
    folder: Path
    weights: Path


def find_model(path: Path) -> FoundModel:
    """Looks at a file or folder.

    Raises CheckpointNotFoundError if nothing is there, CheckpointFormatError if it is not a model or
    if it could be several.
    """
    if path.is_dir():
        return _find_in_folder(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} does not exist")
    return _find_file(path)


def _find_file(path: Path) -> FoundModel:
    try:
        with open(path, "rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from None
    if begin == GGUF_MAGIC:
        return FoundModel(kind="gguf", folder=path.parent, weights=path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return FoundModel(kind="safetensors", folder=path.parent, weights=path)
    if path.suffix == ".gguf":
        raise CheckpointFormatError(f"{path} is not a GGUF file: it does not begin with GGUF")
    raise CheckpointFormatError(f"{path} is not a model; {EXPECTED}")


def _find_in_folder(folder: Path) -> FoundModel:
    if (folder / MANIFEST).is_file():
        return FoundModel(kind="orbax", folder=folder, weights=folder)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    candidates = [name for name in names if name.endswith(".gguf")]
    candidates += _safetensors_candidates(folder, names)
    if len(candidates) > 1:
        raise CheckpointFormatError(
            f"{folder} holds several models ({', '.join(candidates)}); give the path of one file"
        )
    if candidates:
        found = _find_file(folder / candidates[0])
        return dataclasses.replace(found, folder=folder)
    if "_CHECKPOINT_METADATA" in names or "manifest.ocdbt" in names:
        raise CheckpointFormatError(
            f"{folder} is an Orbax checkpoint without {MANIFEST}, so not one of ours; {EXPECTED}"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise CheckpointFormatError(f"{folder} holds PyTorch weights only; {EXPECTED}")
    raise CheckpointFormatError(f"{folder} is not a model; {EXPECTED}")


def _safetensors_candidates(folder: Path, names: list[str]) -> list[str]:
    """Hugging Face's usual names come first; other files are looked at only without them."""
    for usual in ("model.safetensors.index.json", "model.safetensors"):
        if usual in names:
            return [usual]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if indexes:
        return indexes
    files = [name for name in names if name.endswith(".safetensors")]
    if any("-of-" in name for name in files):
        raise CheckpointFormatError(
            f"{folder} holds shards ({files[0]}) without model.safetensors.index.json; fetch it too"
        )
    return files
