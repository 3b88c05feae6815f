"""The least time that a decoding step can take, from bytes and operations (before step 1). No jax.

A bound, not a forecast: it counts what no implementation of this engine's step can leave out, at
the rates that vendors publish, as if memory, arithmetic and links worked side by side without a
pause. Launches, latencies of collectives, and activations are not in it.
"""

from __future__ import annotations

import dataclasses

from jaxserve.config import ModelConfig
from jaxserve.plan.chips import Chip

_SECONDS_PER_HOUR = 3600
#: Logits cross from one program to the other: written, then read.
_LOGITS_PASSES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one device does in a step in which every user gets one token.

    weight_bytes: read once (of an untied embedding only the users' rows are, which are left out).
    kv_bytes: read. logits_bytes: written and read, float32. operations: multiplications and
    additions of matrix products and attention. sent_bytes: what its chip must send to others.
    """

    weight_bytes: int
    kv_bytes: int
    logits_bytes: int
    operations: int
    sent_bytes: float

    @property
    def memory_bytes(self) -> int:
        """All that goes through the memory."""
        return self.weight_bytes + self.kv_bytes + self.logits_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBound:
    """Seconds that each part needs at least, were it alone."""

    memory_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        """No step is faster than its slowest part."""
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)

    @property
    def limited_by(self) -> str:
        """Which part that is."""
        parts = {
            "memory": self.memory_seconds,
            "arithmetic": self.compute_seconds,
            "links": self.link_seconds,
        }
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadWeights:
    """Of the weights that a step multiplies with, on one device: bytes, and elements of matrices."""

    num_bytes: int
    matrix_elements: int


def decode_work(
    model: ModelConfig,
    weights: ReadWeights,
    *,
    users: int,
    context: int,
    tensor_parallel: int,
    kv_token_bytes: int,
    sent_bytes: float,
) -> StepWork:
    """users: one token each, after `context` tokens. kv_token_bytes: of one layer, on one device."""
    seen = seen_tokens(model, context)
    # q . k and weights . v: two products, each a multiplication and an addition per element.
    attention = 4 * (model.num_heads // tensor_parallel) * model.head_size * seen
    return StepWork(
        weight_bytes=weights.num_bytes,
        kv_bytes=users * seen * kv_token_bytes,
        logits_bytes=_LOGITS_PASSES * users * model.vocab_size * 4,
        operations=users * (2 * weights.matrix_elements + attention),
        sent_bytes=sent_bytes,
    )


def seen_tokens(model: ModelConfig, context: int) -> int:
    """Tokens that one query attends to, summed over layers: windows see less."""
    return sum(
        context if layer.window is None else min(context, layer.window) for layer in model.layers
    )


def step_bound(work: StepWork, chip: Chip, dtype: str) -> StepBound:
    """dtype: of what is multiplied, as `operation_rate` takes it."""
    share = chip.devices_per_chip
    return StepBound(
        memory_seconds=work.memory_bytes / (chip.hbm_bytes_per_second / share),
        compute_seconds=work.operations / (operation_rate(chip, dtype) / share),
        link_seconds=work.sent_bytes / chip.link_bytes_per_second,
    )


def operation_rate(chip: Chip, dtype: str) -> float:
    """Operations a second of a chip. float32 has no published rate; bfloat16's is no lower.

    Nor is it where 8 bits have none: there they are multiplied as bfloat16.
    """
    rates = chip.operations_per_second
    return rates.get(dtype, rates["bfloat16"])


def price_per_million(
    seconds: float, *, users: int, num_chips: int, price_per_chip_hour: float
) -> float:
    """Of a million output tokens, when a step of so many seconds gives each user one."""
    per_step = price_per_chip_hour * num_chips * seconds / _SECONDS_PER_HOUR
    return per_step / users * 1e6
