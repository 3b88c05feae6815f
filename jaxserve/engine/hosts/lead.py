"""What whoever needs an engine enters: the leader of several hosts, or the only process there is.

Imports jax only where there are several.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from jaxserve.config import EngineConfig, HostsConfig

if TYPE_CHECKING:
    from jaxserve.engine.device_state import LoadedModel
    from jaxserve.engine.step_device import Device


class Hosts(Protocol):
    """What building an engine must settle with the other hosts."""

    def agree(
        self, path: pathlib.Path, model: LoadedModel, kernels: Mapping[str, str], num_pages: int
    ) -> int:
        """The pool's pages, given how many fit here. Raises UsageError if the hosts differ."""
        ...

    def join_device(self, device: Device) -> Device:
        """What the runner calls, once every host has its programs; device: this process's."""
        ...


class OneHost:
    """All by itself; see `Hosts`."""

    def agree(
        self, path: pathlib.Path, model: LoadedModel, kernels: Mapping[str, str], num_pages: int
    ) -> int:
        """See `Hosts`."""
        del path, model, kernels
        return num_pages

    def join_device(self, device: Device) -> Device:
        """See `Hosts`."""
        return device


@contextlib.contextmanager
def lead(hosts: HostsConfig, config: EngineConfig) -> Iterator[Hosts]:
    """The hosts of an engine that this process leads; the followers end with the block.

    Waits until all of them are there. Raises ResourceError or UsageError, both naming who is to
    blame. When a follower is lost, every later call raises DeviceLostError, and if the block has
    not ended a few seconds later (it may wait for a device that never answers), the process does.
    """
    if not hosts.several:
        yield OneHost()
        return
    assert hosts.leads
    from jaxserve.engine.hosts.ending import exit_code
    from jaxserve.engine.hosts.leader import Leader

    leader = Leader(hosts, config)
    try:
        leader.join()
        yield leader
    except BaseException as error:
        leader.close(str(error) or "it was interrupted", exit_code(error))
        raise
    leader.close()
