"""`tokenizer.json` to a tokeniser (start-up, for steps 2 and 8)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from jaxserve.errors import ModelFormatError, UnsupportedModelError
from jaxserve.tokenizer import token_bytes
from jaxserve.tokenizer.huggingface import HuggingFaceTokenizer
from jaxserve.tokenizer.protocol import LeadingSpace
from jaxserve.tokenizer.special_tokens import end_ids, ids_of_texts
from jaxserve.tokenizer.token_bytes import SPACE_SYMBOL, PieceToBytes


def from_tokenizer_json(text: str, special: Mapping[str, Any]) -> HuggingFaceTokenizer:
    """The tokeniser of a tokenizer.json.

    special: tokenizer_config.json; its add_bos_token decides whether a BOS is put first, else
        the file's own post-processor does.
    Raises ModelFormatError for a damaged file, UnsupportedModelError for an unknown decoder.
    """
    try:
        spec = json.loads(text)
        parsing = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"tokenizer.json cannot be read: {error}") from None
    to_bytes, leading_space = _decoding(spec.get("decoder"))
    added = parsing.get_added_tokens_decoder()
    by_text = {it.content: token for token, it in added.items() if it.special}
    template = parsing.encode("", add_special_tokens=True).ids
    bos = ids_of_texts(special, ["bos_token"], by_text) or template[:1]
    wanted = special.get("add_bos_token")
    return HuggingFaceTokenizer(
        parsing,
        to_bytes=to_bytes,
        leading_space=leading_space,
        bos_id=bos[0] if bos else None,
        eos_ids=end_ids(by_text, ids_of_texts(special, ["eos_token"], by_text)),
        add_bos=wanted if isinstance(wanted, bool) else bool(bos) and template[:1] == bos[:1],
    )


def _decoding(decoder: Mapping[str, Any] | None) -> tuple[PieceToBytes, LeadingSpace]:
    """What the file's decoder does, as a rule for single pieces and one for the first space."""
    steps: Sequence[Mapping[str, Any]] = []
    if decoder is not None:
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    to_bytes: PieceToBytes | None = None
    leading_space = LeadingSpace.KEEP
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                to_bytes = token_bytes.byte_level
            case {"type": "ByteFallback"}:
                to_bytes = token_bytes.sentencepiece
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": symbol}, "content": " "} if (
                symbol == SPACE_SYMBOL
            ):
                to_bytes = to_bytes or token_bytes.sentencepiece_without_bytes
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                leading_space = LeadingSpace.STRIP_ONE
            case {"type": "Metaspace", "replacement": symbol} if symbol == SPACE_SYMBOL:
                to_bytes = to_bytes or token_bytes.sentencepiece_without_bytes
                scheme = "always" if step.get("add_prefix_space", True) else "never"
                if step.get("prepend_scheme", scheme) != "never":
                    leading_space = LeadingSpace.STRIP_ONE
            case _:
                raise UnsupportedModelError(f"tokenizer.json has an unknown decoder step: {step}")
    if to_bytes is None:
        raise UnsupportedModelError(
            "tokenizer.json has no decoder; byte-level and SentencePiece do"
        )
    return to_bytes, leading_space
