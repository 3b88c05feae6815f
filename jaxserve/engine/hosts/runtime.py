"""jax over several processes (before step 1)."""

from __future__ import annotations

import jax

from jaxserve.config import HostsConfig

#: Everybody is there when jax is started, so this is short; jax ends the process when it is over.
START_SECONDS = 60
#: How long an orderly end waits for the others.
END_SECONDS = 10


def start_jax(hosts: HostsConfig) -> None:
    """Joins the processes; from now on `jax.devices()` are those of all hosts."""
    for name, value in (
        ("jax_enable_preemption_service", False),  # it would take SIGTERM for itself
        ("jax_cpu_collectives_implementation", "gloo"),
    ):
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    jax.distributed.initialize(
        hosts.coordinator_address,
        hosts.num_processes,
        hosts.process_id,
        cluster_detection_method="deactivate",
        coordinator_bind_address=hosts.coordinator_address,
        initialization_timeout=START_SECONDS,
        shutdown_timeout_seconds=END_SECONDS,
    )


def end_jax() -> None:
    """Parts in order; waits for the other processes to do the same."""
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]
