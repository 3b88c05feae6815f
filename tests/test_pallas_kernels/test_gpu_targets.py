"""GPUs as targets for the compiler, on machines without one."""

from __future__ import annotations

import importlib.util

import pytest

from pallas_kernels import gpu_targets
from pallas_kernels.errors import KernelError


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(KernelError, match="no GPU target 'h9'; there are h100, h200, b200"):
        gpu_targets.gpu_topology("h9")


def test_a_missing_plugin_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match="pip install --no-deps jax-cuda12-plugin"):
        gpu_targets.gpu_topology("h100")


def test_the_environment_lets_the_plugin_in() -> None:
    environment = {"JAX_PLATFORMS": "cpu", "HOME": "here"}
    gpu_targets.prepare_environment(environment)
    assert environment == {
        "JAX_PLATFORMS": "",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "HOME": "here",
    }


@pytest.mark.parametrize(
    ("name", "capability", "memory"), [("h100", 9, 79), ("h200", 9, 139), ("b200", 10, 178)]
)
def test_descriptions(name: str, capability: int, memory: int) -> None:
    text = gpu_targets.TARGETS[name].description
    assert f"cuda_compute_capability {{ major: {capability} minor: 0 }}" in text
    assert f"device_memory_size: {memory * 2**30}" in text
    assert text.count("{") == text.count("}")
