"""The vocabulary fields of a GGUF file, checked and in one shape (start-up, for steps 2 and 8)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelFormatError
from jaxserve.tokenizer.special_tokens import end_ids


class TokenType(enum.IntEnum):
    """Kinds of tokens; the numbers are those of SentencePiece too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """`tokenizer.ggml.*`. texts, scores and types have one entry per id; scores may be empty."""

    model: str
    pre: str
    texts: list[str]
    scores: list[float]
    types: list[int]
    merges: list[str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    unknown_id: int | None
    add_bos: bool | None
    add_space_prefix: bool | None
    remove_extra_whitespaces: bool
    charsmap: bytes

    @property
    def special(self) -> dict[str, int]:
        """Texts and ids of the special tokens: control tokens and the unknown token."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
        return {
            text: token
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in kinds
        }


def read_vocabulary(fields: Mapping[str, Any]) -> GgufVocabulary:
    """Checks the fields (names without `tokenizer.ggml.`); raises ModelFormatError."""
    texts = [str(text) for text in _array(fields, "tokens")]
    if not texts:
        raise ModelFormatError("the GGUF vocabulary has no tokens")
    types = [int(kind) for kind in _array(fields, "token_type")] or [1] * len(texts)
    scores = [float(score) for score in _array(fields, "scores")]
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(texts):
            raise ModelFormatError(
                f"the GGUF vocabulary has {len(texts)} tokens but {len(values)} entries in {name}"
            )
    special = {
        text: t for t, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind == 3
    }
    ends = [_token_id(fields, f"{name}_token_id", len(texts)) for name in ("eos", "eot", "eom")]
    return GgufVocabulary(
        model=str(fields.get("model", "")),
        pre=str(fields.get("pre") or "default"),
        texts=texts,
        scores=scores,
        types=types,
        merges=[str(merge) for merge in _array(fields, "merges")],
        bos_id=_token_id(fields, "bos_token_id", len(texts)),
        eos_ids=end_ids(special, [token for token in ends if token is not None]),
        unknown_id=_token_id(fields, "unknown_token_id", len(texts)),
        add_bos=_flag(fields, "add_bos_token"),
        add_space_prefix=_flag(fields, "add_space_prefix"),
        remove_extra_whitespaces=bool(_flag(fields, "remove_extra_whitespaces")),
        charsmap=bytes(int(it) & 0xFF for it in _array(fields, "precompiled_charsmap")),
    )


def _array(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise ModelFormatError(f"tokenizer.ggml.{name} is not an array")
    return list(value)


def _token_id(fields: Mapping[str, Any], name: str, count: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not 0 <= int(value) < count:
        raise ModelFormatError(f"tokenizer.ggml.{name} is {value}; the ids are 0 to {count - 1}")
    return int(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    return None if value is None else bool(value)
