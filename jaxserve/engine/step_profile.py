"""Where a step's time goes (observes steps 4 to 7); off unless `Engine.profile_steps` is called.

A step's host work is: schedule, build (packing its inputs), dispatch (handing them to the device),
read (copying its tokens, once they are there) and emit (what is done with them, until the loop comes
round). `wait` is the time in which the host had nothing to do but wait for the device. What the
device does is seen by a thread of its own, which waits for each step's result and notes the time;
so a measured run has the order and the overlap of any other run.

Host work is hidden where the device computes meanwhile. What is not hidden is `idle`: the device
had finished the step before, and the next one had not reached it yet.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxserve.engine.buckets import Bucket
    from jaxserve.engine.step_device import Device
    from jaxserve.engine.step_plan import StepPlan
    from jaxserve.sampling.sampler import SampleResult
    from jaxserve.sampling.state import SlotReset

#: How long the watching thread may have to wait for Python's lock: less than what is measured.
_SWITCH_SECONDS = 1e-4


class StepClock:
    """What an engine tells about its steps; here to nobody."""

    def start(self) -> None:
        """The loop came round."""

    def scheduled(self, plan: StepPlan) -> None:
        """The plan of the next step is made; it may be empty."""

    def reading(self) -> None:
        """The host turns to the oldest step that was not read yet."""

    def read(self) -> None:
        """That step has been read."""

    def forget(self) -> None:
        """A step failed: what was in flight is lost."""


@dataclasses.dataclass(slots=True, kw_only=True)
class StepTimes:
    """One step, in seconds; the last five are times of `time.perf_counter`.

    tokens: query tokens without padding. follows: whether the engine was at work before it.
    """

    tokens: int
    rows: int
    follows: bool
    bucket: int = 0
    schedule: float = 0.0
    build: float = 0.0
    dispatch: float = 0.0
    emit: float = 0.0
    handed_over: float = 0.0
    returned: float = 0.0
    ended: float = 0.0
    read_from: float = 0.0
    read_until: float = 0.0

    @property
    def wait(self) -> float:
        """Of the time of reading, what the device still needed."""
        return min(max(self.ended, self.read_from), self.read_until) - self.read_from

    @property
    def read(self) -> float:
        """The rest of it."""
        return self.read_until - self.read_from - self.wait

    @property
    def host(self) -> float:
        """Seconds of host work."""
        return self.schedule + self.build + self.dispatch + self.read + self.emit

    def began(self, previous_end: float) -> float:
        """When the device began: once it was free and had been told, which is at the end of the
        call, or at its start where the call itself computed."""
        told = self.returned if self.ended > self.returned else self.handed_over
        return max(previous_end, told)


class StepProfile(StepClock):
    """Records every step; `steps` gives those that were read. One thread calls it."""

    def __init__(self) -> None:
        self._done: list[StepTimes] = []
        self._in_flight: collections.deque[StepTimes] = collections.deque()
        self._building: StepTimes | None = None
        self._emitting: StepTimes | None = None
        self._read_early = False
        self._now = time.perf_counter
        self._mark = 0.0
        self._switch_seconds = sys.getswitchinterval()
        self._watched: queue.SimpleQueue[tuple[StepTimes, SampleResult] | None] = (
            queue.SimpleQueue()
        )
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._watch, name="step-profile", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """See `StepClock`; time since the last step is its emitting, unless there was no work."""
        passed = self._passed()
        self._read_early = False
        if self._emitting is not None and self._in_flight:
            self._emitting.emit += passed

    def scheduled(self, plan: StepPlan) -> None:
        """See `StepClock`."""
        passed = self._passed()
        self._building = None
        if plan.rows:
            self._building = StepTimes(
                tokens=plan.num_tokens,
                rows=len(plan.rows),
                follows=bool(self._in_flight) or self._read_early,
            )
            self._in_flight.append(self._building)
        if self._in_flight:
            self._in_flight[-1].schedule += passed

    def reading(self) -> None:
        """See `StepClock`."""
        step = self._in_flight[0]
        step.emit += self._passed()  # counting
        step.read_from = self._mark

    def read(self) -> None:
        """See `StepClock`."""
        self._passed()
        self._emitting = self._in_flight.popleft()
        self._emitting.read_until = self._mark
        self._done.append(self._emitting)
        self._read_early = True  # as far as the next plan of this turn is concerned

    def forget(self) -> None:
        """See `StepClock`."""
        self._in_flight.clear()
        self._building = self._emitting = None

    def steps(self) -> list[StepTimes]:
        """All that were read, in order; ends the profile."""
        self._watched.put(None)
        self._thread.join()
        sys.setswitchinterval(self._switch_seconds)
        return self._done

    def watch(self, device: Device) -> Device:
        """The same device, its calls being timed."""
        return _WatchedDevice(device, self)

    def calling(self) -> None:
        """A call to the device begins; what came before it was building."""
        passed = self._passed()
        if self._building is not None:
            self._building.build += passed

    def called(self, bucket: Bucket | None = None, result: SampleResult | None = None) -> None:
        """The call is over. bucket: it began a step of that shape. result: it completed one."""
        before, passed = self._mark, self._passed()
        step = self._building
        if step is None:
            return
        step.dispatch += passed
        if bucket is not None:
            step.bucket, step.handed_over, step.returned = bucket.tokens, before, self._mark
        if result is not None:
            self._watched.put((step, result))
            self._building = None

    def _passed(self) -> float:
        before, self._mark = self._mark, self._now()
        return self._mark - before

    def _watch(self) -> None:
        while (item := self._watched.get()) is not None:
            step, result = item
            result.tokens.block_until_ready()
            step.ended = time.perf_counter()


class _WatchedDevice:
    """See `Device`; passes every call on and tells the profile of it."""

    def __init__(self, device: Device, profile: StepProfile) -> None:
        self._device = device
        self._profile = profile

    def forward(self, bucket: Bucket, packed: np.ndarray) -> None:
        self._profile.calling()
        self._device.forward(bucket, packed)
        self._profile.called(bucket=bucket)

    def sample(self, rows: int, packed: np.ndarray) -> SampleResult:
        self._profile.calling()
        result = self._device.sample(rows, packed)
        self._profile.called(result=result)
        return result

    def reset_slot(self, reset: SlotReset) -> None:
        self._profile.calling()
        self._device.reset_slot(reset)
        self._profile.called()

    def allow_tokens(self, slots: np.ndarray, masks: np.ndarray) -> None:
        self._profile.calling()
        self._device.allow_tokens(slots, masks)
        self._profile.called()

    def renew(self) -> None:
        self._device.renew()

    def read(self, array: jax.Array) -> np.ndarray:
        return self._device.read(array)
