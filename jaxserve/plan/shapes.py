"""From a model's argument to its shape, without its weights (before step 1). No jax of its own.

A built-in name of `models.json`, a config.json or a folder with one, a GGUF file or one of our
own checkpoints (of which only the head is read), or a hub id (of which only config.json is
fetched).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from checkpoints.errors import CheckpointNotFoundError, DownloadFailedError
from checkpoints.folder_files import CONFIG, read_folder_config, read_json_object
from checkpoints.kinds import MANIFEST
from checkpoints.open import open_checkpoint
from checkpoints.reader import CheckpointReader, TensorInfo, TokenizerFiles
from checkpoints.resolve import HUB_ID, resolve_model
from jaxserve.config import ModelConfig
from jaxserve.models.registry import read_model_config

TABLE = Path(__file__).parent / "models.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownShape:
    """One entry of `models.json`: the fields of a published config.json that decide the shape."""

    source: str
    config: dict[str, Any]


class ConfigOnly:
    """A Hugging Face checkpoint of which only config.json is here; see `CheckpointReader`."""

    convention = "hf"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tensors: Mapping[str, TensorInfo] = {}

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Raises CheckpointNotFoundError."""
        raise CheckpointNotFoundError(f"{name} is not here: there is only a {CONFIG}")

    def tokenizer_files(self) -> TokenizerFiles:
        """Raises CheckpointNotFoundError."""
        raise CheckpointNotFoundError(f"there is no tokeniser, only a {CONFIG}")


@cache
def known_shapes() -> Mapping[str, KnownShape]:
    """The built-in shapes by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, KnownShape])


def read_shape(argument: str, cache: Path) -> tuple[ModelConfig, str]:
    """A model's configuration, and in words where it is from.

    Raises ModelError or CheckpointError.
    """
    reader, source = _open(argument, cache)
    return read_model_config(reader), source


def _open(argument: str, cache: Path) -> tuple[CheckpointReader, str]:
    if argument in known_shapes():
        known = known_shapes()[argument]
        return ConfigOnly(known.config), f"built in, from {known.source}"
    path = Path(argument).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ConfigOnly(read_json_object(path)), str(path)
    if (path / CONFIG).is_file() and not (path / MANIFEST).is_file():
        return ConfigOnly(read_folder_config(path)), str(path / CONFIG)
    hub = HUB_ID.fullmatch(argument)
    if hub and not path.exists() and path.suffix not in (".gguf", ".safetensors"):
        fetched = fetch_config(hub["id"], hub["revision"])
        return ConfigOnly(read_json_object(fetched)), f"{CONFIG} of {argument}"
    try:
        found = resolve_model(argument, cache, pull_missing=False)
    except CheckpointNotFoundError as error:
        shapes = ", ".join(known_shapes())
        raise CheckpointNotFoundError(f"{error}; shapes are built in for {shapes}") from None
    return open_checkpoint(found), str(found)


def fetch_config(repository: str, revision: str | None) -> Path:
    """config.json of a hub repository, and nothing else. Raises DownloadFailedError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, CONFIG, revision=revision))
    except Exception as error:  # the hub's client lets several HTTP libraries' errors through
        first = (str(error).splitlines() or [""])[0][:200]
        raise DownloadFailedError(
            f"{repository} is no path here, and its {CONFIG} could not be fetched from the hub "
            f"({type(error).__name__}: {first}); give the path of a {CONFIG}"
        ) from None
