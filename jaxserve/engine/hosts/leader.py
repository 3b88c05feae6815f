"""The leader's side of an engine over several hosts (before step 1, and inside step 6).

Waits for the followers, checks that all hosts have the same in hand, and publishes each call to the
device before it makes it. Threads: one that takes connections while followers are awaited, and one
per follower (`Line`). A lost follower is noticed there, while the engine's own thread may sit in a
collective that never ends.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import pathlib
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxserve.config import EngineConfig, HostsConfig, hosts_token_from_environment
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device_state import LoadedModel
from jaxserve.engine.hosts import messages
from jaxserve.engine.hosts.ending import AGAIN, end_process, end_without_jax
from jaxserve.engine.hosts.facts import describe_difference, model_facts, settings_facts
from jaxserve.engine.hosts.line import Line, frame
from jaxserve.engine.hosts.listening import check_free, listen
from jaxserve.engine.hosts.runtime import end_jax, start_jax
from jaxserve.engine.step_device import Device
from jaxserve.errors import DeviceLostError, ResourceError, UsageError
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import SlotReset

logger = logging.getLogger("jaxserve.engine")

#: How long the engine has to end by itself once a follower is lost; then the process is ended.
GRACE_SECONDS = 3.0
#: How long a step that failed waits to hear that the reason is a lost follower.
EXPLAIN_SECONDS = 2.0

Message = TypeVar("Message")


class Leader:
    """Process 0. One thread joins, agrees, publishes and closes. See `lead.Hosts`."""

    def __init__(self, hosts: HostsConfig, config: EngineConfig) -> None:
        self._hosts = hosts
        self._facts = settings_facts(config)
        self._token = hosts_token_from_environment()
        self._lines: dict[int, Line] = {}
        #: Messages that are waited for; None when a follower is lost.
        self._inbox: queue.SimpleQueue[tuple[Line, Any]] = queue.SimpleQueue()
        self._lost = threading.Event()
        self._why = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ready = False

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on, None while it can."""
        return self._why if self._lost.is_set() else None

    def join(self) -> None:
        """Waits for every follower, then starts jax with them. Raises ResourceError, UsageError."""
        host, port = self._hosts.address
        check_free(host, port)
        others = self._others()
        logger.info("waiting on %s:%d for %s", host, port + 1, _names(others))
        deadline = time.monotonic() + self._hosts.join_seconds
        with listen(host, port + 1, self._meet):
            while missing := [number for number in others if number not in self._lines]:
                self._check()
                try:
                    line, message = self._inbox.get(timeout=max(0, deadline - time.monotonic()))
                except queue.Empty:
                    raise ResourceError(self._missing(missing)) from None
                if message is not None:
                    self._admit(line, message)
        self.publish(messages.Welcome())
        start_jax(self._hosts)

    def agree(
        self, path: pathlib.Path, model: LoadedModel, kernels: Mapping[str, str], num_pages: int
    ) -> int:
        """See `Hosts`: the fewest pages of all hosts."""
        facts = model_facts(path, model, kernels)
        for number, message in self._gather(messages.Facts).items():
            if difference := describe_difference(facts, message.facts, number):
                raise self._refuse(self._lines[number], number, difference)
            num_pages = min(num_pages, message.num_pages)
        self.publish(messages.Agreed(num_pages))
        return num_pages

    def join_device(self, device: Device) -> Device:
        """See `Hosts`."""
        self._gather(messages.Ready)
        self._ready = True
        logger.info("%s ready", _names(self._others()))
        return LeadingDevice(self, device)

    def publish(self, message: messages.FromLeader) -> None:
        """Sends a message to every follower. Raises DeviceLostError."""
        self._check()
        data = frame(message)
        for line in self._lines.values():
            try:
                line.send(data)
            except OSError as error:
                raise self.explain(error) from None

    def explain(self, error: Exception) -> DeviceLostError:
        """Why a call failed: a follower that is lost, which may become known just after."""
        self._lost.wait(EXPLAIN_SECONDS)
        reason = self.lost or (
            f"a step over several hosts failed, and they cannot renew their state alone: {error}; "
            f"{AGAIN}"
        )
        return DeviceLostError(reason)

    def close(self, error: str = "", code: int = 0) -> None:
        """Tells the followers to end, and why if all is not well; code: what this process exits with.

        In order, that is without an error, only between steps: every call that was published must
        have been made.
        """
        with self._lock:
            self._closed.set()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(frame(messages.Shutdown(error)))
        for line in self._lines.values():
            line.close()
        if self._ready and not error and not self._lost.is_set():
            end_jax()
        else:
            end_without_jax(code)

    def _others(self) -> range:
        assert self._hosts.num_processes is not None
        return range(1, self._hosts.num_processes)

    def _meet(self, connection: socket.socket) -> None:
        """Somebody connected (called in the listening thread)."""
        Line(connection, messages.decode_from_follower, self._take, self._on_lost)

    def _take(self, line: Line, message: Any) -> None:
        """Something arrived (called in the line's thread)."""
        if isinstance(message, messages.Failed):
            self._on_lost(line, f"failed: {message.error}")
        else:
            self._inbox.put((line, message))

    def _admit(self, line: Line, message: Any) -> None:
        """The first message of a new connection."""
        if not isinstance(message, messages.Hello):
            line.close()
            return
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            logger.warning("refused %s, which has another JAXSERVE_HOSTS_TOKEN", line.peer)
            line.try_send(messages.Refused("its JAXSERVE_HOSTS_TOKEN is not the leader's"))
            line.close()
            return
        number = message.process_id
        if difference := self._difference(message):
            raise self._refuse(line, number, difference)
        line.trust()
        self._lines[number] = line
        logger.info("process %d is here, from %s", number, line.peer)

    def _difference(self, hello: messages.Hello) -> str | None:
        if hello.num_processes != self._hosts.num_processes:
            return (
                f"--num-processes is {hello.num_processes} on process {hello.process_id} and "
                f"{self._hosts.num_processes} on process 0"
            )
        if hello.process_id in self._lines:
            return (
                f"--process-id {hello.process_id} is taken by {self._lines[hello.process_id].peer}"
            )
        return describe_difference(self._facts, hello.facts, hello.process_id)

    def _refuse(self, line: Line, number: int, difference: str) -> UsageError:
        text = f"process {number} ({line.peer}) is refused: {difference}"
        with contextlib.suppress(OSError):
            line.send(frame(messages.Refused(text)))
        if line not in self._lines.values():
            line.close()
        return UsageError(text)

    def _gather(self, kind: type[Message]) -> dict[int, Message]:
        """One message of this kind from every follower. Raises DeviceLostError."""
        found: dict[int, Message] = {}
        while len(found) < len(self._lines):
            self._check()
            line, message = self._inbox.get()
            if message is not None:
                assert isinstance(message, kind), message
                found[self._number(line)] = message
        return found

    def _number(self, line: Line) -> int:
        return next(number for number, other in self._lines.items() if other is line)

    def _missing(self, missing: list[int]) -> str:
        host, port = self._hosts.address
        return (
            f"{_names(missing)} of {self._hosts.num_processes} did not come to {host}:{port + 1} "
            f"within {self._hosts.join_seconds:g} seconds; start the same command there with its "
            "own --process-id, or wait longer with --join-seconds"
        )

    def _check(self) -> None:
        if self._lost.is_set():
            raise DeviceLostError(self._why)

    def _on_lost(self, line: Line, reason: str) -> None:
        """A connection ended (called in its thread)."""
        if line not in self._lines.values():
            return  # somebody who never was a follower
        number = self._number(line)
        with self._lock:
            if self._closed.is_set() or self._lost.is_set():
                return
            self._why = f"process {number} ({line.peer}) {reason}; {AGAIN}"
            self._lost.set()
        logger.error("%s", self._why)
        self._inbox.put((line, None))  # wakes whoever waits for a message
        for other in self._lines.values():
            other.try_send(messages.Shutdown(self._why))
        if not self._closed.wait(GRACE_SECONDS):
            end_process(self._why)


class LeadingDevice:
    """The leader's device: what is called on it, every host calls on its own. See `Device`."""

    def __init__(self, leader: Leader, device: Device) -> None:
        self._leader = leader
        self._device = device

    def forward(self, bucket: Bucket, packed: np.ndarray) -> None:
        """See `Device`. Raises DeviceLostError."""
        self._leader.publish(messages.to_forward(bucket, packed))
        try:
            self._device.forward(bucket, packed)
        except Exception as error:
            raise self._leader.explain(error) from error

    def sample(self, rows: int, packed: np.ndarray) -> SampleResult:
        """See `Device`. Raises DeviceLostError."""
        self._leader.publish(messages.Sample(rows, packed.tobytes()))
        try:
            return self._device.sample(rows, packed)
        except Exception as error:
            raise self._leader.explain(error) from error

    def reset_slot(self, reset: SlotReset) -> None:
        """See `Device`. Raises DeviceLostError."""
        self._leader.publish(messages.to_reset(reset))
        try:
            self._device.reset_slot(reset)
        except Exception as error:
            raise self._leader.explain(error) from error

    def allow_tokens(self, slots: np.ndarray, masks: np.ndarray) -> None:
        """See `Device`. Raises DeviceLostError."""
        self._leader.publish(messages.to_allow(slots, masks))
        try:
            self._device.allow_tokens(slots, masks)
        except Exception as error:
            raise self._leader.explain(error) from error

    def renew(self) -> None:
        """See `Device`. Raises DeviceLostError."""
        self._leader.publish(messages.Renew())
        self._device.renew()

    def read(self, array: jax.Array) -> np.ndarray:
        """See `Device`. Raises DeviceLostError."""
        try:
            return self._device.read(array)
        except Exception as error:
            raise self._leader.explain(error) from error


def _names(numbers: range | list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    return "processes " + ", ".join(map(str, numbers))
