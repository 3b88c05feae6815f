"""Quantised weights on disk: found again, made again when damaged, never mixed up."""

from __future__ import annotations

import logging
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_tiny_llama

from checkpoints.open import open_checkpoint
from jaxserve.models import weight_store
from jaxserve.models.loading import load_model
from jaxserve.models.weight_store import ALIGNMENT, WeightStore
from jaxserve.parallel.mesh import make_mesh
from jaxserve.quantization.weights import Quantization, WeightFormat
from pallas_kernels.quantized_matmul.scheme import named_scheme

ARRAYS = {
    "values": np.arange(300, dtype=np.uint8).reshape(3, 100),
    "scales": np.linspace(0, 1, 7).astype(np.float16),
    "norm": np.full((5,), 2.5, jnp.bfloat16),
    "nothing": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_tiny_llama(tmp_path / "model")


def keep(folder: pathlib.Path, model: pathlib.Path, *facts: object) -> WeightStore:
    store = WeightStore(folder, model, facts)
    store.put({name: jnp.asarray(array) for name, array in ARRAYS.items()})
    return store


def test_arrays_come_back_aligned_and_as_they_were(
    tmp_path: pathlib.Path, model: pathlib.Path
) -> None:
    keep(tmp_path / "kept", model, "a")
    found = WeightStore(tmp_path / "kept", model, ["a"]).get()
    assert found is not None
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        assert found[name].ctypes.data % ALIGNMENT == 0
    assert WeightStore(tmp_path / "kept", model, ["b"]).get() is None


def test_other_weights_in_the_same_place_are_not_mistaken(
    tmp_path: pathlib.Path, model: pathlib.Path
) -> None:
    keep(tmp_path / "kept", model)
    file = model / "model.safetensors"
    times = file.stat().st_mtime_ns
    write_tiny_llama(model, seed=1)
    os.utime(file, ns=(times, times))
    assert WeightStore(tmp_path / "kept", model, []).get() is None


@pytest.mark.parametrize("place", [0, 20, 40, -330, -1, "cut", "empty"])
def test_a_damaged_file_is_not_used(
    tmp_path: pathlib.Path,
    model: pathlib.Path,
    place: int | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = keep(tmp_path, model)
    (path,) = tmp_path.glob("*.weights")
    data = bytearray(path.read_bytes())
    if isinstance(place, str):
        data = data[:-64] if place == "cut" else bytearray()
    else:
        # The file ends with padding, which nothing reads: count from the last array's bytes.
        data[place - (64 - 10) if place == -1 else place] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="jaxserve.models"):
        assert store.get() is None
    assert "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, logger="jaxserve.models"):
        keep(blocked, model)
    assert "could not be stored" in caplog.text


def test_the_models_unused_for_longest_are_forgotten(
    tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_store, "MAX_MODELS", 1)
    first = keep(tmp_path, model, "first")
    for path in tmp_path.glob("*.weights"):
        os.utime(path, (1, 1))
    second = keep(tmp_path, model, "second")
    assert first.get() is None
    assert second.get() is not None


def test_a_second_start_reads_no_tensor_and_gets_the_same_model(
    tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh(1)
    form = WeightFormat(scheme=named_scheme("int8_group32"), implementation="reference", mesh=mesh)

    def load() -> list[np.ndarray]:
        reader = open_checkpoint(model)
        if (tmp_path / "kept").exists():
            monkeypatch.setattr(reader, "read", None)
        _, decoder = load_model(
            reader,
            mesh,
            dtype=jnp.float32,
            quantization=Quantization(layers=form, embedding=form),
            store=WeightStore(tmp_path / "kept", model, [form.scheme]),
        )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(decoder)]

    first, second = load(), load()
    assert len(first) > 20
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)
