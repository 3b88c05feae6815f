"""A GGUF file's byte-level BPE vocabulary to a tokeniser (start-up, for steps 2 and 8)."""

from __future__ import annotations

import tokenizers
from tokenizers import models

from jaxserve.errors import ModelFormatError
from jaxserve.tokenizer import token_bytes
from jaxserve.tokenizer.gguf_vocabulary import GgufVocabulary, TokenType
from jaxserve.tokenizer.huggingface import HuggingFaceTokenizer
from jaxserve.tokenizer.pre_tokenizers import ADD_BOS, IGNORE_MERGES, make_pre_tokenizer
from jaxserve.tokenizer.protocol import LeadingSpace


def from_byte_level(vocabulary: GgufVocabulary) -> HuggingFaceTokenizer:
    """The tokeniser of a vocabulary whose model is "gpt2".

    Raises UnsupportedModelError for an unknown pre-tokeniser, ModelFormatError for merges that
    do not fit the tokens.
    """
    pre_tokenizer = make_pre_tokenizer(vocabulary.pre)
    ids = {text: token for token, text in enumerate(vocabulary.texts)}
    try:
        model = models.BPE(
            vocab=ids,
            merges=[_pair(merge) for merge in vocabulary.merges],
            ignore_merges=vocabulary.pre in IGNORE_MERGES,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"the GGUF vocabulary's merges cannot be used: {error}") from None
    parsing = tokenizers.Tokenizer(model)
    parsing.pre_tokenizer = pre_tokenizer
    parsing.add_tokens(_added_tokens(vocabulary))
    add_bos = vocabulary.pre in ADD_BOS if vocabulary.add_bos is None else vocabulary.add_bos
    return HuggingFaceTokenizer(
        parsing,
        to_bytes=token_bytes.byte_level,
        leading_space=LeadingSpace.KEEP,
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        add_bos=add_bos,
    )


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ") if merge[:1] != " " else (merge, "", "")
    if not (left and space and right):
        raise ModelFormatError(f"the GGUF vocabulary has a merge {merge!r} that is not two pieces")
    return left, right


def _added_tokens(vocabulary: GgufVocabulary) -> list[tokenizers.AddedToken]:
    """Control tokens are special, user-defined ones are always found; both stand for their text."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    return [
        tokenizers.AddedToken(text, special=kind in special, normalized=False)
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True)
        if text and (kind in special or kind == TokenType.USER_DEFINED)
    ]
