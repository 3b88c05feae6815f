"""From a checkpoint's tokeniser files to a `Tokenizer` (start-up, for steps 2 and 8).

Chooses the backend once; knows nothing of where the files were found.
"""

from __future__ import annotations

from checkpoints.reader import TokenizerFiles
from jaxserve.errors import UnsupportedModelError
from jaxserve.tokenizer.protocol import Tokenizer


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokeniser of `files`.

    Raises UnsupportedModelError for a kind we do not have, ModelFormatError for broken files.
    """
    raise UnsupportedModelError("no tokenizer.json, tokenizer.model or GGUF vocabulary was found")
