"""`--distributed auto`: asks the cluster how many processes there are and which one this is.

jax knows Cloud TPU, Slurm, Open MPI and Kubernetes. Asking it means importing it, which the server's
parent must not do; so it is asked in a process of its own, `python -m jaxserve.engine.hosts.detect`.
"""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys

import msgspec

from jaxserve.config import HostsConfig
from jaxserve.errors import ResourceError, UsageError


def find_hosts(config: HostsConfig) -> HostsConfig:
    """The settings with what the cluster says filled in; as they are where nothing is asked.

    Raises UsageError where there is no cluster, ResourceError where it does not answer.
    """
    if config.distributed != "auto":
        return config
    command = [sys.executable, "-m", "jaxserve.engine.hosts.detect", str(int(config.join_seconds))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ResourceError(f"--distributed auto: the cluster could not be asked: {words}")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=HostsConfig)
    given = {
        name: getattr(config, name)
        for name in ("num_processes", "process_id", "coordinator_address")
        if getattr(config, name) is not None
    }
    whole = dataclasses.replace(found, **given, distributed="off", join_seconds=config.join_seconds)
    if whole.num_processes is None:
        raise UsageError(
            "--distributed auto: this machine belongs to no cluster that jax knows; leave it out "
            "for one host, or give --num-processes, --process-id and --coordinator-address"
        )
    whole.validate()
    return whole


def ask_cluster(seconds: int) -> HostsConfig:
    """What jax finds out; nothing is set where it finds no cluster. Touches no device."""
    from jax._src import clusters  # jax tells in public only once it has started with it

    address, count, number, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, seconds
    )
    return HostsConfig(num_processes=count, process_id=number, coordinator_address=address)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    print(msgspec.json.encode(ask_cluster(int(sys.argv[1]))).decode())
