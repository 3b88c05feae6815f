"""A verb on a host that does not lead: it says what it is, follows, and ends with the leader."""

from __future__ import annotations

import logging
import sys

from jaxserve.config import EngineConfig, HostsConfig


def follow_leader(hosts: HostsConfig, engine: EngineConfig, log_level: str) -> int:
    """Returns 0 once the leader has ended in order. Raises JaxserveError or CheckpointError."""
    logging.basicConfig(
        level=log_level.upper(),
        format=f"[process {hosts.process_id}] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    print(
        f"process {hosts.process_id} of {hosts.num_processes}: follows process 0 at "
        f"{hosts.coordinator_address}, serves nothing itself, and ends when process 0 ends",
        file=sys.stderr,
        flush=True,
    )
    from jaxserve.engine.hosts.follow import follow

    follow(hosts, engine)
    print("process 0 has ended, and so does this", file=sys.stderr)
    return 0
