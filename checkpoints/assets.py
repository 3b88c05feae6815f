"""A model's config and tokeniser without its weights, whatever kind of model it is.

Front-end workers (steps 1 and 2 of the walk) read them here: neither this module nor anything it
imports may import jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.folder_files import read_folder_config, read_folder_tokenizer
from checkpoints.gguf_reader import GgufReader
from checkpoints.kinds import find_model
from checkpoints.reader import TokenizerFiles


def read_config(path: Path) -> Mapping[str, Any]:
    """What `open_checkpoint(path).config` is; errors as there."""
    found = find_model(path)
    if found.kind == "gguf":
        return GgufReader(found.weights).config
    return read_folder_config(found.folder)


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """What `open_checkpoint(path).tokenizer_files()` returns; errors as there."""
    found = find_model(path)
    if found.kind == "gguf":
        return GgufReader(found.weights).tokenizer_files()
    return read_folder_tokenizer(found.folder)
