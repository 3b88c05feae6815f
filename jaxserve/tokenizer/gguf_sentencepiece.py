"""A GGUF file's SentencePiece vocabulary to a tokeniser (start-up, for steps 2 and 8).

The file holds pieces, scores and types but not the model they came from; an equivalent one is
put together: identity normaliser (or the file's own), byte fallback when all bytes are there.
"""

from __future__ import annotations

from jaxserve.errors import ModelFormatError
from jaxserve.tokenizer import sentencepiece_proto as proto
from jaxserve.tokenizer.gguf_vocabulary import GgufVocabulary, TokenType
from jaxserve.tokenizer.sentencepiece_model import SentencePieceTokenizer
from jaxserve.tokenizer.token_bytes import SPACE_SYMBOL

_NUM_BYTES = 256


def from_sentencepiece(vocabulary: GgufVocabulary, *, unigram: bool) -> SentencePieceTokenizer:
    """The tokeniser of a vocabulary whose model is "llama" (BPE) or "t5" (unigram).

    Raises ModelFormatError for a vocabulary that SentencePiece does not take.
    """
    add_bos = (not unigram) if vocabulary.add_bos is None else vocabulary.add_bos
    return SentencePieceTokenizer(
        _model(vocabulary, unigram=unigram),
        special=vocabulary.special,
        added={},
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        add_bos=add_bos,
        prefix_every_part=True,
    )


def _model(vocabulary: GgufVocabulary, *, unigram: bool) -> bytes:
    if not vocabulary.scores:
        raise ModelFormatError("the GGUF vocabulary is of SentencePiece kind but has no scores")
    types = list(vocabulary.types)
    if TokenType.UNKNOWN not in types:  # SentencePiece wants exactly one
        types[vocabulary.unknown_id or 0] = TokenType.UNKNOWN
    all_bytes = types.count(TokenType.BYTE) == _NUM_BYTES
    kind = proto.UNIGRAM if unigram else proto.BPE
    prefix = True if vocabulary.add_space_prefix is None else vocabulary.add_space_prefix
    trainer = proto.int_field(proto.MODEL_TYPE, kind) + proto.int_field(
        proto.BYTE_FALLBACK, int(all_bytes)
    )
    normalizer = b"".join(
        [
            proto.bytes_field(proto.NORMALIZER_NAME, b"identity"),
            proto.bytes_field(proto.CHARSMAP, vocabulary.charsmap),
            proto.int_field(proto.ADD_DUMMY_PREFIX, int(prefix)),
            proto.int_field(
                proto.REMOVE_EXTRA_WHITESPACES, int(vocabulary.remove_extra_whitespaces)
            ),
            proto.int_field(proto.ESCAPE_WHITESPACES, 1),
        ]
    )
    return b"".join(
        [
            proto.bytes_field(proto.TRAINER, trainer),
            proto.bytes_field(proto.NORMALIZER, normalizer),
            # Files write user-defined pieces of spaces as spaces.
            proto.piece_fields(
                [text.replace(" ", SPACE_SYMBOL) for text in vocabulary.texts],
                vocabulary.scores,
                types,
            ),
        ]
    )
