"""The doctor: what it shows, and that it says in words what is wrong."""

from __future__ import annotations

import pathlib
import shutil
from collections import namedtuple

import jax
import pytest
from tiny_chat_model import write_tiny_chat_model

from jaxserve.cli import doctor_engine, doctor_machine
from jaxserve.cli.doctor_report import Section
from jaxserve.cli.main import main
from jaxserve.config import EngineConfig, ServerConfig
from server.launch import bind


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"))


def value(section: Section, name: str) -> str:
    return dict(section.lines)[name]


def run_doctor(*arguments: str) -> int:
    return main(["doctor", "--port", "0", *arguments])


def test_all_right_is_exit_code_0(
    cache: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(str(model)) == 0
    out = capsys.readouterr().out
    for title in ("installation", "processor", "cache folder", "port", "devices", "model"):
        assert f"\n{title}" in f"\n{out}"
    assert f"jax                {jax.__version__}" in out
    assert "kernels            paged_attention: " in out
    assert out.endswith("\nall right\n")


def test_every_trouble_is_printed_and_makes_exit_code_1(
    cache: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code = main(["doctor", str(model), "--port", str(port), "--tensor-parallel", "9"])
    assert code == 1
    out = capsys.readouterr().out
    assert f"WRONG: cannot listen on 127.0.0.1:{port}" in out
    assert "--tensor-parallel is 9 but there are 8 cpu devices" in out
    assert f"wrong:\n  - cannot listen on 127.0.0.1:{port}" in out


def test_a_wrong_setting_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--page-size", "5") == 2
    assert capsys.readouterr().err.startswith("error: --page-size is 5")


def test_an_old_python_is_named() -> None:
    assert (
        "Python 3.10 is not supported" in doctor_machine.look_at_installation((3, 10)).troubles[0]
    )
    assert "Python 3.14" in doctor_machine.look_at_installation((3, 14)).troubles[0]
    assert doctor_machine.look_at_installation((3, 12)).troubles == []


def test_missing_and_mismatched_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(doctor_machine.PACKAGES, "1.0")
    monkeypatch.setattr(doctor_machine, "_version", {**versions, "jaxlib": "0.9"}.get)
    assert (
        "jax 1.0 and jaxlib 0.9 do not belong together"
        in (doctor_machine.look_at_installation().troubles[0])
    )
    del versions["numba"]
    monkeypatch.setattr(doctor_machine, "_version", versions.get)
    assert doctor_machine.look_at_installation().troubles == [
        "the package numba is missing; install jaxserve again with pip"
    ]


def test_cpu_features_that_matter_are_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: x\nflags\t\t: fpu avx2 fma amx_int8 sse\n")
    monkeypatch.setattr(doctor_machine.platform, "machine", lambda: "x86_64")
    assert value(doctor_machine.look_at_processor(cpuinfo), "instructions") == "avx2 fma amx_int8"
    cpuinfo.write_text("flags\t\t: fpu sse\n")
    assert "slow" in value(doctor_machine.look_at_processor(cpuinfo), "")
    assert "instructions" not in dict(doctor_machine.look_at_processor(tmp_path / "none").lines)


def test_the_cache_folder_is_measured(tmp_path: pathlib.Path) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "deep" / "a").write_bytes(bytes(3_000_000))
    section = doctor_machine.look_at_cache(tmp_path)
    assert value(section, "models") == "3 MB"
    assert value(section, "programs") == "0 MB"
    assert section.troubles == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    (trouble,) = doctor_machine.look_at_cache(blocked / "cache").troubles
    assert f"{blocked}/cache cannot be written" in trouble
    assert "JAXSERVE_CACHE" in trouble


def test_a_full_disk_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5_000_000))
    (trouble,) = doctor_machine.look_at_cache(tmp_path).troubles
    assert "has 5 MB free" in trouble


def test_a_port_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_machine.look_at_port(ServerConfig(port=0)).troubles == []
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        (trouble,) = doctor_machine.look_at_port(ServerConfig(port=port)).troubles
    assert f"127.0.0.1:{port}" in trouble
    assert "--port" in trouble


@pytest.mark.parametrize(
    ("device", "extra"), [("dev/nvidia0", "jaxserve[cuda13]"), ("dev/accel0", "jaxserve[tpu]")]
)
def test_an_accelerator_that_jax_does_not_use_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, device: str, extra: str
) -> None:
    path = tmp_path / device
    path.parent.mkdir()
    path.touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    (trouble,) = doctor_engine.look_at_devices(EngineConfig(), tmp_path).troubles
    assert extra in trouble
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (trouble,) = doctor_engine.look_at_devices(EngineConfig(), tmp_path).troubles
    assert "JAX_PLATFORMS=cpu keeps JAX from it; unset it" in trouble


def test_a_jax_without_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend\n'tpu'")

    monkeypatch.setattr(jax, "devices", fail)
    (trouble,) = doctor_engine.look_at_devices(EngineConfig()).troubles
    assert trouble.startswith("JAX finds no device: Unable to initialize backend 'tpu'")


def test_settings_are_resolved_without_weights(
    cache: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = EngineConfig(
        model=str(model), num_pages=50, max_num_batched_tokens=20, max_num_seqs=4, max_model_len=300
    )
    section = doctor_engine.look_at_model(config)
    assert section.troubles == []
    assert value(section, "dtype") == "float32, KV pages bfloat16"
    assert value(section, "weights as") == "int8_group32_a16"
    assert value(section, "max_model_len") == "300 (the model's own limit: 512)"
    assert value(section, "step sizes") == "1, 2, 4, 8, 16, 24 tokens"
    # a page: 2 (k, v) x 2 layers x 4 heads x 16 tokens x 16 wide x 2 bytes
    assert value(section, "KV pool").startswith(f"50 pages, {50 * 8192 / 1e6:,.0f} MB, 784 tokens")
    chosen = value(section, "kernels")
    reference = doctor_engine.look_at_model(EngineConfig(model=str(model), kernels="reference"))
    assert value(reference, "kernels").startswith("paged_attention: reference")
    assert chosen.startswith("paged_attention: ")


def test_a_model_that_is_not_pulled_yet_is_no_trouble(cache: pathlib.Path) -> None:
    section = doctor_engine.look_at_model(EngineConfig())
    assert section.troubles == []
    assert "jaxserve pull smollm2-135m-instruct" in value(section, "files")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/no/such.gguf"}, "/no/such.gguf does not exist"),
        ({"max_model_len": 10_000}, "--max-model-len is 10000"),
        ({"tensor_parallel": 3}, "--tensor-parallel 3 does not divide"),
        ({"kernels": "magic"}, "kernels is 'magic'"),
        ({"num_pages": 10**9}, "weights and KV pool need"),
        ({"kv_memory_bytes": 100}, "no room for the KV pool"),
    ],
)
def test_what_cannot_work_with_this_model_is_named(
    cache: pathlib.Path, model: pathlib.Path, changes: dict[str, object], words: str
) -> None:
    config = EngineConfig(**{"model": str(model), **changes})
    (trouble,) = doctor_engine.look_at_model(config).troubles
    assert words in trouble
