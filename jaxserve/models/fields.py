"""Typed access to a model's own configuration, whose faults become one-line errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxserve.errors import ModelFormatError, UnsupportedModelError

T = TypeVar("T")


class _Required:
    """Marks a field that has no default."""


REQUIRED = _Required()


class Fields:
    """Reads fields of `values`. A field that is absent or null takes the default, if there is one.

    where: what the fields belong to ("config.json", "GGUF metadata"), for messages.
    prefix: put before every key (GGUF's "llama.").
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The raw value, None when it is absent."""
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        """Whether the key is there at all, be it null."""
        return self.prefix + key in self.values

    def fault(self, key: str, what: str) -> ModelFormatError:
        """An error about one field."""
        return ModelFormatError(f"{self.where}: {self.prefix}{key} {what}")

    def unsupported(self, key: str, value: object, supported: Sequence[str]) -> Exception:
        """An error about a value that would be right for another program."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{key} is {value!r}, which is not supported; "
            f"supported: {', '.join(supported)}"
        )

    def integer(self, key: str, default: int | _Required = REQUIRED) -> int:
        """A whole number above 0."""
        value = self.get(key)
        if value is None:
            return self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.fault(key, f"is {value!r}; it must be a whole number")
        if value < 1:
            raise self.fault(key, f"is {value!r}; it must be at least 1")
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        """A whole number above 0, or None."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if value is None:
            return float(self._default(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fault(key, f"is {value!r}; it must be a number above 0")
        if not math.isfinite(value):
            raise self.fault(key, f"is {value!r}; it must be finite")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None."""
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(key, f"is {value!r}; it must be true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        """A string."""
        value = self.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, str):
            raise self.fault(key, f"is {value!r}; it must be a string")
        return value

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """A list with one entry per layer, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != num_layers:
            raise self.fault(key, f"must be a list with one entry for each of {num_layers} layers")
        return list(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number or a list; empty when absent."""
        value = self.get(key)
        if value is None:
            return ()
        ids = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.fault(key, f"is {value!r}; it must hold token ids")
        return tuple(ids)

    def _default(self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            raise self.fault(key, "is missing")
        return default
