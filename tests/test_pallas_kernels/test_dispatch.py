"""The choice of an implementation, and its reasons."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError

FACTS: dict[str, object] = {
    "dtype": "float32",
    "page_dtype": "float32",
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_size": 64,
    "page_size": 16,
}


def choose(platform: str = "cpu", kernels: str = "auto", **changes: object) -> dispatch.Choice:
    facts = FACTS | changes
    return dispatch.choose("paged_attention", platform=platform, kernels=kernels, **facts)


def test_best_that_works_is_chosen() -> None:
    choice = choose()
    assert (choice.implementation, dict(choice.refused)) == ("cpu", {})
    assert str(choice) == "paged_attention: cpu"


def test_other_platforms_get_the_definition_and_the_reasons() -> None:
    choice = choose("rocm")
    assert choice.implementation == "reference"
    assert str(choice) == (
        "paged_attention: reference (not cpu: it runs on cpu, not on rocm; "
        "not tpu: it runs on tpu, not on rocm; not gpu: it runs on gpu, not on rocm)"
    )


def test_a_tpu_gets_its_own() -> None:
    choice = choose("tpu")
    assert str(choice) == "paged_attention: tpu (not cpu: it runs on cpu, not on tpu)"


def test_a_gpu_gets_its_own() -> None:
    choice = choose("gpu")
    assert str(choice) == (
        "paged_attention: gpu (not cpu: it runs on cpu, not on gpu; "
        "not tpu: it runs on tpu, not on gpu)"
    )


def test_the_definition_can_be_forced() -> None:
    choice = choose(kernels="reference")
    assert choice.implementation == "reference"
    forced = ("kernels is 'reference'",)
    assert choice.refused == {"cpu": forced, "tpu": forced, "gpu": forced}


def test_environment_is_read_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSERVE_KERNELS", raising=False)
    assert dispatch.kernels_from_environment() == "auto"
    monkeypatch.setenv("JAXSERVE_KERNELS", "reference")
    assert dispatch.kernels_from_environment() == "reference"
    assert choose().implementation == "cpu"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_dtype": "float16"}, "pages of float16"),
        ({"dtype": "float64"}, "q, k and v of float64"),
    ],
)
def test_dtypes_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    choice = choose(**changes)
    assert choice.implementation == "reference"
    assert any(reason in text for text in choice.refused["cpu"])


def test_missing_numba_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else real(name)
    )
    assert choose().refused["cpu"] == ("the package numba is not installed",)


def test_all_reasons_stand_in_the_error() -> None:
    with pytest.raises(KernelError) as error:
        choose("tpu", page_dtype="float16", num_heads=10)
    for part in ("not on tpu", "pages of float16 are not among", "reference:", "10 query heads"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_forced_implementation_that_cannot_work_is_an_error() -> None:
    with pytest.raises(KernelError, match="reference: kernels is 'cpu'"):
        choose("gpu", kernels="cpu")


def test_unknown_names() -> None:
    with pytest.raises(KernelError, match="there is no op 'fly'"):
        dispatch.choose("fly", platform="cpu")
    with pytest.raises(KernelError, match=r"use auto or one of .*cpu.*reference"):
        choose(kernels="fastest")


def test_a_name_that_only_another_op_has_means_auto() -> None:
    choice = dispatch.choose("sample", platform="cpu", kernels="cpu", vocab_size=10)
    assert choice.implementation == "xla"
    choice = dispatch.choose("sample", platform="cpu", kernels="reference", vocab_size=10)
    assert choice.implementation == "reference"


def test_every_entry_of_the_table_can_be_asked() -> None:
    for op, names in dispatch.IMPLEMENTATIONS.items():
        assert names[-1] == "reference", op
        for name in names:
            module = __import__(f"pallas_kernels.{op}.{name}", fromlist=["refusals"])
            assert callable(module.refusals)
            assert callable(getattr(module, op))


def test_asking_imports_neither_numba_nor_starts_jax() -> None:
    """A front end may print choices without a device."""
    program = f"""
import sys
from pallas_kernels import dispatch
assert "jax" not in sys.modules
dispatch.choose("paged_attention", platform="cpu", **{FACTS!r})
assert "numba" not in sys.modules
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
