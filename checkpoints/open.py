"""Opens a model's files with the reader that fits their content: the way into this package.

Step 6 of the walk begins with it. The Orbax reader, and with it jax, is imported only for Orbax
folders; processes that must stay free of jax use `checkpoints.assets` instead.
"""

from __future__ import annotations

from pathlib import Path

from checkpoints.gguf_reader import GgufReader
from checkpoints.kinds import find_model
from checkpoints.reader import CheckpointReader
from checkpoints.safetensors_reader import SafetensorsReader


def open_checkpoint(path: Path) -> CheckpointReader:
    """A reader for a Hugging Face folder, a safetensors or GGUF file, or one of our Orbax folders.

    Raises CheckpointNotFoundError if nothing is there, CheckpointFormatError if it is not a model,
    could be several, or is damaged.
    """
    found = find_model(path)
    if found.kind == "gguf":
        return GgufReader(found.weights)
    if found.kind == "orbax":
        from checkpoints.orbax_reader import OrbaxReader  # brings jax

        return OrbaxReader(found.folder)
    return SafetensorsReader(found.folder, found.weights)
