"""What must be the same on all hosts of an engine, and how a difference is told (before step 1).

Hosts that run different programs, or the same on different weights, would hang or answer nonsense.
Facts are texts by name; the name is what a user would look at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping

import jax
import jaxlib.version

from jaxserve.config import EngineConfig
from jaxserve.engine.device_state import LoadedModel
from jaxserve.engine.program_store import processor, source_digest

#: Settings that only the leader uses, or that may be written differently (a folder's path).
LEADERS_OWN = {"model", "served_name", "max_queue_len", "max_queued_tokens", "async_scheduling"}
#: Of every file so many blocks of so many bytes are looked at.
_BLOCKS, _BLOCK_BYTES = 16, 65536
_SHOWN = 200


def settings_facts(config: EngineConfig) -> dict[str, str]:
    """Known before anything is loaded: versions and flags."""
    facts = {
        "jaxserve's source": source_digest()[:16],
        "the version of jax": f"{jax.__version__} with jaxlib {jaxlib.version.__version__}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    for field in dataclasses.fields(config):
        if field.name not in LEADERS_OWN:
            facts[f"--{field.name.replace('_', '-')}"] = str(getattr(config, field.name))
    return facts


def model_facts(
    path: pathlib.Path, device: LoadedModel, kernels: Mapping[str, str]
) -> dict[str, str]:
    """Known once the model is loaded. path: its file or folder."""
    devices = sorted({device.device_kind for device in device.mesh.devices.flat})
    facts = {
        "the model's files": fingerprint(path),
        "the model's shape": repr(device.config),
        "the dtype": device.dtype.name,
        "the weights": _digest([(array.shape, array.dtype.name) for array in device.weights]),
        "the pages' dtype": device.page_dtype.name,
        "the kernels": "; ".join(kernels.values()),
        "the devices": ", ".join(devices),
    }
    if device.mesh.devices.flat[0].platform == "cpu":  # it decides how sums are rounded
        facts["the processor"] = processor()
    return facts


def fingerprint(path: pathlib.Path) -> str:
    """A digest of names, sizes and some blocks of every file of a model; quick for any size."""
    folder = path if path.is_dir() else path.parent
    files = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue  # what a download leaves behind
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with file.open("rb") as data:
            for block in range(_BLOCKS):
                data.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                digest.update(data.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def describe_difference(
    leader: Mapping[str, str], follower: Mapping[str, str], number: int
) -> str | None:
    """The first fact in which process `number` differs, with both values; None if there is none."""
    for name in (*leader, *follower):
        ours, theirs = leader.get(name), follower.get(name)
        if ours != theirs:
            return f"{name} is {_shown(theirs)} on process {number} and {_shown(ours)} on process 0"
    return None


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _shown(value: str | None) -> str:
    if not value:
        return "nothing"
    return value if len(value) <= _SHOWN else value[:_SHOWN] + " ..."
