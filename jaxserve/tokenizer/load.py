"""From a checkpoint's tokeniser files to a `Tokenizer` (start-up, for steps 2 and 8).

Chooses the backend once; knows nothing of where the files were found.
"""

from __future__ import annotations

from checkpoints.reader import TokenizerFiles
from jaxserve.errors import UnsupportedModelError
from jaxserve.tokenizer.gguf_byte_level import from_byte_level
from jaxserve.tokenizer.gguf_sentencepiece import from_sentencepiece
from jaxserve.tokenizer.gguf_vocabulary import read_vocabulary
from jaxserve.tokenizer.protocol import Tokenizer
from jaxserve.tokenizer.tokenizer_json import from_tokenizer_json
from jaxserve.tokenizer.tokenizer_model import from_tokenizer_model


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokeniser of `files`.

    Raises UnsupportedModelError for a kind we do not have, ModelFormatError for broken files.
    """
    if files.tokenizer_json is not None:
        return from_tokenizer_json(files.tokenizer_json, files.special)
    if files.sentencepiece_model is not None:
        return from_tokenizer_model(files.sentencepiece_model, files.special)
    if files.gguf_vocab is None:
        raise UnsupportedModelError("no tokenizer.json, tokenizer.model or GGUF vocabulary")
    vocabulary = read_vocabulary(files.gguf_vocab)
    match vocabulary.model:
        case "gpt2":
            return from_byte_level(vocabulary)
        case "llama":
            return from_sentencepiece(vocabulary, unigram=False)
        case "t5":
            return from_sentencepiece(vocabulary, unigram=True)
        case other:
            raise UnsupportedModelError(
                f"the GGUF vocabulary is of kind {other!r}; supported are gpt2 (byte-level BPE), "
                "llama and t5 (SentencePiece)"
            )
