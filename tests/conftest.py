"""What all tests share: eight virtual CPU devices, golden values, and models in the cache folder."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

# Before jax is imported anywhere: tests of sharding need several devices.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402 - after the environment is set

#: Processes for a run of all tests: each takes a core, and 1 to 2 GiB.
MOST_WORKERS = 4
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process per core where the default tests run; none where files or other tests are named."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not everything or not str(config.option.markexpr).startswith("not slow"):
        return 0
    return min(os.cpu_count() or 1, MOST_WORKERS)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Folder of independent reference values; JAXSERVE_GOLDEN overrides its place."""
    folder = pathlib.Path(
        os.environ.get("JAXSERVE_GOLDEN", REPOSITORY.parent / "shared" / "golden")
    )
    if not folder.is_dir():
        pytest.skip("no golden values: set JAXSERVE_GOLDEN to their folder")
    return folder


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """XLA's quickest compilation, for modules whose programs run for milliseconds.

    Not where results are compared bit by bit between programs of XLA's own code.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
