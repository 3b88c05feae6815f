"""Refusing text that no tokeniser can take (part of step 2)."""

from __future__ import annotations

from jaxserve.errors import RequestError


def check_text(text: str) -> None:
    """Raises RequestError if `text` holds a lone surrogate, which is no Unicode character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}; send whole characters",
            code="invalid_unicode",
        ) from None
