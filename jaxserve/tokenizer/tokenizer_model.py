"""`tokenizer.model` (a SentencePiece file) to a tokeniser (start-up, for steps 2 and 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.tokenizer.sentencepiece_model import SentencePieceTokenizer, load_processor
from jaxserve.tokenizer.special_tokens import end_ids, ids_of_texts


def from_tokenizer_model(model: bytes, special: Mapping[str, Any]) -> SentencePieceTokenizer:
    """The tokeniser of a tokenizer.model.

    special: tokenizer_config.json; its added_tokens_decoder may add tokens past the model's
        pieces, add_bos_token and legacy are honoured. Without it a BOS that the model has comes
        first, as SentencePiece models want.
    Raises ModelFormatError for a damaged file.
    """
    processor = load_processor(model)
    pieces = range(processor.get_piece_size())
    control = {
        processor.id_to_piece(token): token for token in pieces if processor.is_control(token)
    }
    added = {}
    for key, entry in dict(special.get("added_tokens_decoder") or {}).items():
        token, text = int(key), str(entry["content"])
        if entry.get("special") and not _is_unknown(processor, token):
            control[text] = token
        elif token >= len(pieces):
            added[text] = token
    bos = ids_of_texts(special, ["bos_token"], control)
    bos_id = bos[0] if bos else _token_id(processor.bos_id())
    eos_id = _token_id(processor.eos_id())
    declared = ids_of_texts(special, ["eos_token"], control) or ([] if eos_id is None else [eos_id])
    wanted = special.get("add_bos_token")
    return SentencePieceTokenizer(
        model,
        special=control,
        added=added,
        bos_id=bos_id,
        eos_ids=end_ids(control, declared),
        add_bos=wanted if isinstance(wanted, bool) else bos_id is not None,
        prefix_every_part=special.get("legacy") is not False,
    )


def _is_unknown(processor: Any, token: int) -> bool:
    return token < processor.get_piece_size() and bool(processor.is_unknown(token))


def _token_id(token: int) -> int | None:
    """SentencePiece says -1 for a token that a model does not have."""
    return token if token >= 0 else None
