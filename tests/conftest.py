"""What all tests share: eight virtual CPU devices, golden values, and models in the cache folder."""

from __future__ import annotations

import os
import pathlib

# Before jax is imported anywhere: tests of sharding need several devices.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402 - after the environment is set

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Folder of independent reference values; JAXSERVE_GOLDEN overrides its place."""
    folder = pathlib.Path(
        os.environ.get("JAXSERVE_GOLDEN", REPOSITORY.parent / "shared" / "golden")
    )
    if not folder.is_dir():
        pytest.skip("no golden values: set JAXSERVE_GOLDEN to their folder")
    return folder


@pytest.fixture(scope="session")
def data() -> pathlib.Path:
    """Reference values that stand in the repository."""
    return REPOSITORY / "tests" / "data"


def _pulled(name: str, *, download: bool) -> pathlib.Path:
    from checkpoints import pull
    from checkpoints.errors import CheckpointError
    from jaxserve.config import cache_folder

    found = sorted((cache_folder() / "models" / name).glob("*.gguf"))
    if found:
        return found[0]
    if not download and os.environ.get("JAXSERVE_TEST_PULL") != "all":
        pytest.skip(f"{name} is not in the cache: `jaxserve pull {name}` or JAXSERVE_TEST_PULL=all")
    try:
        return pull.pull(name, cache_folder())
    except CheckpointError as error:
        pytest.skip(f"{name} could not be pulled: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
    """The default model; pulled (93 MB) when it is not in the cache folder."""
    return _pulled("smollm2-135m-instruct", download=True)


@pytest.fixture(scope="session")
def gemma3_gguf() -> pathlib.Path:
    """Gemma 3 270m, only when it was pulled before (253 MB) or JAXSERVE_TEST_PULL=all."""
    return _pulled("gemma-3-270m", download=False)
