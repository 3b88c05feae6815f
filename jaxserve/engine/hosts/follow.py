"""A follower: makes the calls that the leader makes, until the leader ends (inside step 6).

It has no scheduler, no queue and no server. Its main thread loads, compiles and then calls; the
line's thread notices that the leader is gone and ends the process, since the main thread may sit in
a collective that never ends.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import queue
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from jaxserve.config import EngineConfig, HostsConfig, hosts_token_from_environment
from jaxserve.engine.build import make_device
from jaxserve.engine.device_state import LoadedModel
from jaxserve.engine.hosts import messages
from jaxserve.engine.hosts.ending import AGAIN, end_process, end_without_jax, exit_code
from jaxserve.engine.hosts.facts import model_facts, settings_facts
from jaxserve.engine.hosts.line import Line, frame
from jaxserve.engine.hosts.runtime import end_jax, start_jax
from jaxserve.engine.step_device import Device
from jaxserve.errors import DeviceLostError, ResourceError, UsageError
from jaxserve.sampling.sampler import SampleResult

logger = logging.getLogger("jaxserve.engine")

_RETRY_SECONDS = 0.3
#: How long a failed call waits for news of the leader's end, which may be its reason.
_EXPLAIN_SECONDS = 2.0

Message = TypeVar("Message")


def follow(hosts: HostsConfig, config: EngineConfig) -> None:
    """Follows the leader until it ends; returns if it ended in order.

    Raises UsageError where the leader refuses this process, ResourceError where there is none. Ends
    the process, with a line on standard error, when the leader is gone or failed.
    """
    config.validate()
    follower = Follower(hosts, config)
    try:
        follower.join()
        start_jax(hosts)
        device, _ = make_device(config, hosts=follower)
        with _patient():
            follower.serve(device)
    except BaseException as error:
        follower.close(str(error) or "it was interrupted")
        end_without_jax(exit_code(error))
        raise
    follower.close()
    end_jax()


class Follower:
    """Process 1 or higher. One thread joins, agrees and serves. See `lead.Hosts`."""

    def __init__(self, hosts: HostsConfig, config: EngineConfig) -> None:
        self._hosts = hosts
        self._facts = settings_facts(config)
        self._line: Line | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready = threading.Event()
        #: The leader has said its last word: its connection may end.
        self._over = threading.Event()

    @property
    def line(self) -> Line:
        """To the leader, once connected."""
        assert self._line is not None
        return self._line

    def join(self) -> None:
        """Finds the leader and waits until everybody is there. Raises ResourceError, UsageError."""
        assert self._hosts.process_id is not None
        assert self._hosts.num_processes is not None
        self._line = Line(self._connect(), messages.decode_from_leader, self._take, self._on_lost)
        self._line.trust()
        hello = messages.Hello(
            self._hosts.process_id,
            self._hosts.num_processes,
            hosts_token_from_environment(),
            self._facts,
        )
        self._line.send(frame(hello))
        self._expect(messages.Welcome)

    def agree(
        self, path: pathlib.Path, model: LoadedModel, kernels: Mapping[str, str], num_pages: int
    ) -> int:
        """See `Hosts`."""
        facts = model_facts(path, model, kernels)
        self.line.send(frame(messages.Facts(facts, num_pages)))
        return self._expect(messages.Agreed).num_pages

    def join_device(self, device: Device) -> Device:
        """See `Hosts`."""
        self._ready.set()
        self.line.send(frame(messages.Ready()))
        return device

    def serve(self, device: Device) -> None:
        """Makes the leader's calls until it says that all is over.

        Never more than one step ahead of the device, as the leader.
        """
        previous: SampleResult | None = None
        while not isinstance(message := self._inbox.get(), messages.Shutdown):
            try:
                if isinstance(message, messages.Forward):
                    device.forward(*messages.from_forward(message))
                elif isinstance(message, messages.Sample):
                    result = device.sample(message.rows, messages.from_packed(message.packed))
                    if previous is not None:
                        device.read(previous.tokens)
                    previous = result
                elif isinstance(message, messages.ResetSlot):
                    device.reset_slot(messages.from_reset(message))
                elif isinstance(message, messages.AllowTokens):
                    device.allow_tokens(*messages.from_allow(message))
                else:
                    assert isinstance(message, messages.Renew), message
                    device.renew()
            except Exception as error:
                time.sleep(_EXPLAIN_SECONDS)  # if the leader is gone, the line ends the process
                raise DeviceLostError(f"a step failed: {error}") from error

    def close(self, error: str = "") -> None:
        """Leaves; error: why this process cannot go on."""
        if self._line is None:
            return
        if error:
            self._line.try_send(messages.Failed(error))
        self._line.close()

    def _connect(self) -> socket.socket:
        host, port = self._hosts.address
        deadline = time.monotonic() + self._hosts.join_seconds
        while True:
            try:
                return socket.create_connection((host, port + 1), timeout=5)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"the leader (process 0) does not answer at {host}:{port + 1} since "
                        f"{self._hosts.join_seconds:g} seconds ({error.strerror or error}); start "
                        "the same command there with --process-id 0, or wait longer with "
                        "--join-seconds"
                    ) from None
                time.sleep(_RETRY_SECONDS)

    def _expect(self, kind: type[Message]) -> Message:
        message = self._inbox.get()
        if isinstance(message, messages.Refused):
            raise UsageError(message.error)
        assert isinstance(message, kind), message
        return message

    def _take(self, line: Line, message: Any) -> None:
        """In the line's thread."""
        if isinstance(message, messages.Shutdown):
            if message.error:
                end_process(f"process 0 ended: {message.error}")
            if not self._ready.is_set():  # the main thread loads or compiles what nobody needs
                end_process("process 0 ended before the engine was ready", code=0)
        if isinstance(message, messages.Shutdown | messages.Refused):
            self._over.set()
        self._inbox.put(message)

    def _on_lost(self, line: Line, reason: str) -> None:
        """In the line's thread."""
        if not self._over.is_set():
            end_process(f"process 0 ({line.peer}) {reason}; {AGAIN}")


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """The first SIGTERM or Ctrl-C changes nothing, since the leader ends its followers.

    So hosts that are all told to end at once still finish what the leader has open.
    """

    def note(number: int, frame: types.FrameType | None) -> None:
        print(
            "this process ends with process 0; the same signal again ends it now", file=sys.stderr
        )
        signal.signal(number, signal.SIG_DFL)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
