"""Many small arrays in one: a step's inputs travel to the device as a single int32 array.

Handing an array to a compiled program costs the host tens of microseconds; a step has some thirty
small ones. The layout is fixed per bucket: on the host the fields are numpy views of one buffer, on
the device they are static slices of one array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORD = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One array: any shape; int32, uint32 or float32, or bool (kept as an int32 word each)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def words(self) -> int:
        return math.prod(self.shape)


class PackedLayout:
    """Where each named field stands in the buffer, in the mapping's order."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self.size = sum(field.words for field in fields.values())
        for name, field in fields.items():
            assert field.dtype in ("int32", "uint32", "float32", "bool"), f"{name}: {field.dtype}"

    def make_buffer(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A zeroed buffer [size] int32 and writable views of its fields (bool fields as int32).

        A new one for every step: the device may read the buffer while the next step is built.
        """
        buffer = np.zeros(self.size, np.int32)
        views, start = {}, 0
        for name, field in self.fields.items():
            words = buffer[start : start + field.words]
            kind = np.int32 if field.dtype == "bool" else np.dtype(field.dtype)
            views[name] = words.view(kind).reshape(field.shape)
            start += field.words
        return buffer, views

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The fields again, inside a program."""
        fields, start = {}, 0
        for name, field in self.fields.items():
            words = lax.slice(buffer, (start,), (start + field.words,)).reshape(field.shape)
            start += field.words
            if field.dtype == "bool":
                fields[name] = words != 0
            elif field.dtype == "int32":
                fields[name] = words
            else:
                fields[name] = lax.bitcast_convert_type(words, jnp.dtype(field.dtype))
        return fields
