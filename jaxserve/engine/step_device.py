"""Runs a step's compiled programs on packed inputs (steps 6 and 7). Knows neither plans nor requests.

What a step needs of the device is six calls, so that an engine over several hosts can have every
host make the same calls (`hosts/`): there the leader's `Device` tells the others first. A step is
`forward`, then `sample`: between them the host may still find out what `sample` needs to know,
while the device computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.programs import Weights
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import SamplingState, SlotReset
from pallas_kernels.paged_attention.reference import KVPages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Everything compiled: see `programs`; `reset_slot` and `allow_tokens` are `sampling.state`'s."""

    forward: Mapping[Bucket, jax.stages.Compiled]
    sample: Mapping[int, jax.stages.Compiled]
    reset_slot: jax.stages.Compiled
    allow_tokens: jax.stages.Compiled


class Device(Protocol):
    """The calls. All but `read` return before the device is done."""

    def forward(self, bucket: Bucket, packed: np.ndarray) -> None:
        """The first half of a step, up to the logits; packed: see `programs.forward_layout`."""
        ...

    def sample(self, rows: int, packed: np.ndarray) -> SampleResult:
        """The second half, on the logits of the last `forward`; packed: see `sample_layout`.

        rows: those of `forward`'s bucket.
        """
        ...

    def reset_slot(self, reset: SlotReset) -> None:
        """Renews one slot of the sampling state."""
        ...

    def allow_tokens(self, slots: np.ndarray, masks: np.ndarray) -> None:
        """Which tokens the next `sample` may choose: see `sampling.state.allow_tokens`."""
        ...

    def renew(self) -> None:
        """New pages and sampling state, all empty."""
        ...

    def read(self, array: jax.Array) -> np.ndarray:
        """Waits for one array of a step's result."""
        ...


class StepDevice:
    """Holds the weights and the device's mutable state of this process; see `Device`."""

    def __init__(
        self,
        weights: Weights,
        programs: Programs,
        make_device_state: Callable[[], tuple[KVPages, SamplingState]],
    ) -> None:
        self._weights = weights
        self._programs = programs
        self._make_device_state = make_device_state
        self._pages, self._sampling = make_device_state()
        self._logits: jax.Array | None = None

    def forward(self, bucket: Bucket, packed: np.ndarray) -> None:
        """See `Device`."""
        self._pages, self._logits = self._programs.forward[bucket](
            self._weights, self._pages, self._sampling.last_token, packed
        )

    def sample(self, rows: int, packed: np.ndarray) -> SampleResult:
        """See `Device`."""
        logits, self._logits = self._logits, None
        assert logits is not None, "sample without forward"
        result: SampleResult
        self._sampling, result = self._programs.sample[rows](logits, self._sampling, packed)
        return result

    def reset_slot(self, reset: SlotReset) -> None:
        """See `Device`."""
        self._sampling = self._programs.reset_slot(self._sampling, reset)

    def allow_tokens(self, slots: np.ndarray, masks: np.ndarray) -> None:
        """See `Device`."""
        self._sampling = self._programs.allow_tokens(self._sampling, slots, masks)

    def renew(self) -> None:
        """See `Device`."""
        self._pages, self._sampling = self._make_device_state()

    def read(self, array: jax.Array) -> np.ndarray:
        """See `Device`."""
        return np.asarray(array)
