"""Messages between the processes of one engine over several hosts (inside step 6).

msgpack; arrays travel as their bytes. Structs are arrays on the wire. All processes run the same
version, which the first message checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from jaxserve.engine.buckets import Bucket
from jaxserve.sampling.state import SlotReset

#: dtype, shape and bytes of an array.
WireArray = tuple[str, tuple[int, ...], bytes]


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Both ways, every second: I am alive."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Follower to leader, first: who I am. facts: see `facts.settings_facts`."""

    process_id: int
    num_processes: int
    token: str
    facts: Mapping[str, str]


class Facts(msgspec.Struct, tag="facts", array_like=True, frozen=True):
    """Follower to leader: the model is loaded; what I made of it, and the KV pages that fit here."""

    facts: Mapping[str, str]
    num_pages: int


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """Follower to leader: all programs are compiled."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Follower to leader, last: I cannot go on."""

    error: str


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """Leader to follower: everybody is there; start jax."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Leader to follower, instead of Welcome or Agreed: why you cannot follow."""

    error: str


class Agreed(msgspec.Struct, tag="agreed", array_like=True, frozen=True):
    """Leader to follower: the pool's pages, as many as fit on every host."""

    num_pages: int


class Forward(msgspec.Struct, tag="forward", array_like=True, frozen=True):
    """Leader to follower: `Device.forward`; the bucket, and the packed int32 inputs as bytes."""

    tokens: int
    rows: int
    packed: bytes


class Sample(msgspec.Struct, tag="sample", array_like=True, frozen=True):
    """Leader to follower: `Device.sample`; the packed int32 inputs as bytes."""

    rows: int
    packed: bytes


class ResetSlot(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Leader to follower: `Device.reset_slot`; the fields of a SlotReset in their order."""

    arrays: list[WireArray]


class AllowTokens(msgspec.Struct, tag="allow", array_like=True, frozen=True):
    """Leader to follower: `Device.allow_tokens`; slots as int32, masks as uint32 words."""

    slots: bytes
    masks: bytes


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    """Leader to follower: `Device.renew`."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Leader to follower, last. error: what went wrong; empty when all is well."""

    error: str = ""


FromFollower = Hello | Facts | Ready | Failed | Beat
FromLeader = (
    Welcome
    | Refused
    | Agreed
    | Forward
    | Sample
    | ResetSlot
    | AllowTokens
    | Renew
    | Shutdown
    | Beat
)

encode = msgspec.msgpack.Encoder().encode
decode_from_follower = msgspec.msgpack.Decoder(FromFollower).decode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode


def to_forward(bucket: Bucket, packed: np.ndarray) -> Forward:
    """The message of the first half of a step."""
    return Forward(bucket.tokens, bucket.rows, packed.tobytes())


def from_forward(message: Forward) -> tuple[Bucket, np.ndarray]:
    """The arguments of `Device.forward` again."""
    return Bucket(tokens=message.tokens, rows=message.rows), from_packed(message.packed)


def from_packed(data: bytes) -> np.ndarray:
    """Packed int32 inputs again, read-only."""
    return np.frombuffer(data, np.int32)


def to_allow(slots: np.ndarray, masks: np.ndarray) -> AllowTokens:
    """The message of some slots' masks."""
    return AllowTokens(slots.tobytes(), masks.tobytes())


def from_allow(message: AllowTokens) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of `Device.allow_tokens` again."""
    slots = np.frombuffer(message.slots, np.int32)
    return slots, np.frombuffer(message.masks, np.uint32).reshape(len(slots), -1)


def to_reset(reset: SlotReset) -> ResetSlot:
    """The message of one slot's reset."""
    fields: list[Any] = [np.asarray(field) for field in reset]
    return ResetSlot([(field.dtype.str, field.shape, field.tobytes()) for field in fields])


def from_reset(message: ResetSlot) -> SlotReset:
    """The argument of `Device.reset_slot` again."""
    return SlotReset(
        *(np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in message.arrays)
    )
