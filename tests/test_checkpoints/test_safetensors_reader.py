"""Hugging Face folders: one file and shards, every dtype, slices, and damage of every kind."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from checkpoints.open import open_checkpoint
from checkpoints.safetensors_reader import SafetensorsFile

WEIGHTS = {
    "model.embed_tokens.weight": np.arange(30, dtype=np.float32).reshape(10, 3),
    "model.norm.weight": np.arange(3, dtype=np.float16),
}


def write_raw(path: pathlib.Path, header: Any, body: bytes) -> pathlib.Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def write_folder(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 10}')
    return folder


def write_shards(folder: pathlib.Path) -> dict[str, str]:
    """Two shards and their index; returns the weight map."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    weight_map = {}
    for number, (name, array) in enumerate(WEIGHTS.items(), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: array}, folder / shard)
        weight_map[name] = shard
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: pathlib.Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_single_file(tmp_path: pathlib.Path) -> None:
    reader = open_checkpoint(write_folder(tmp_path))
    assert reader.convention == "hf"
    assert reader.config == {"model_type": "llama", "vocab_size": 10}
    assert {name: info.dtype for name, info in reader.tensors.items()} == {
        "model.embed_tokens.weight": "float32",
        "model.norm.weight": "float16",
    }
    for name, array in WEIGHTS.items():
        read = reader.read(name)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def test_the_path_of_the_file_works_too(tmp_path: pathlib.Path) -> None:
    reader = open_checkpoint(write_folder(tmp_path) / "model.safetensors")
    assert reader.config["vocab_size"] == 10


def test_shards(tmp_path: pathlib.Path) -> None:
    write_shards(tmp_path)
    reader = open_checkpoint(tmp_path)
    assert set(reader.tensors) == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(reader.read(name), array)


def test_generation_config(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(tmp_path).config["generation_config"] == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F64", np.float64),
        ("I64", np.int64),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    ],
)
def test_dtypes_at_odd_offsets(tmp_path: pathlib.Path, stored: str, dtype: Any) -> None:
    values = np.array([[0, 1, 1], [1, 0, 2]]).astype(dtype)
    header = {
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": stored, "shape": [2, 3], "data_offsets": [1, 1 + values.nbytes]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, b"\0" + values.tobytes()))
    read = file.read("w", None)
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(file.read("w", [slice(1, 2), slice(0, 3, 2)]), values[1:2, ::2])


def test_scalar_and_empty(tmp_path: pathlib.Path) -> None:
    arrays = {"scalar": np.array(7, np.int32), "empty": np.zeros((0, 5), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.read("scalar", None) == 7
    assert file.read("empty", None).shape == (0, 5)


def test_slices_of_a_tensor_longer_than_one_copy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints.mapped_file.COPY_BYTES", 64)
    array = np.arange(7 * 5 * 3, dtype=np.int32).reshape(7, 5, 3)
    save_file({"w": array}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for index in ([], [slice(1, 6, 2)], [slice(None, None, -1), slice(0, 2)], [slice(6, 1, -3)]):
        np.testing.assert_array_equal(file.read("w", index), array[tuple(index)])


READ_ALL = """
import pathlib, re, sys
from checkpoints.safetensors_reader import SafetensorsFile

def peak():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", text)[1]) * 1024

file = SafetensorsFile(pathlib.Path(sys.argv[1]))
before = peak()
for name in file.tensors:
    assert not file.read(name, None).any()
print(peak() - before)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_reading_a_long_file_does_not_keep_it(tmp_path: pathlib.Path) -> None:
    """400 MB in ten tensors: never more than a tensor, and what is being copied, is resident."""
    size = 40 * 10**6
    header = {
        f"w{i}": {
            "dtype": "U8",
            "shape": [1000, 40_000],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(10)
    }
    path = write_raw(tmp_path / "long.safetensors", header, b"")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 10 * size)
    grown = int(subprocess.check_output([sys.executable, "-c", READ_ALL, path]))
    assert size < grown < 2.9 * size


def test_every_truncation_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    content = (write_folder(tmp_path) / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointFormatError) as caught:
            open_checkpoint(tmp_path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damage_never_escapes(tmp_path: pathlib.Path, data: st.DataObject) -> None:
    content = bytearray((write_folder(tmp_path) / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        reader = open_checkpoint(tmp_path)
        for name in reader.tensors:
            reader.read(name)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}, "dtype 'Q9'"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "needs 12"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": [2**39, 2**39, 0], "data_offsets": [0, 0]}, "shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "truncated"),
        (None, "described by None"),
    ],
)
def test_nonsense_entries(tmp_path: pathlib.Path, entry: Any, message: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"w": entry}, bytes(8))
    with pytest.raises(CheckpointFormatError, match=message):
        SafetensorsFile(path)


def test_not_safetensors_at_all(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x80\x02}q\x00(X\x05\x00" * 20)
    with pytest.raises(CheckpointFormatError, match="not a safetensors file"):
        open_checkpoint(path)
    write_raw(path, ["a"], b"")
    with pytest.raises(CheckpointFormatError, match="header is a list"):
        open_checkpoint(path)


def test_index_names_a_missing_shard(tmp_path: pathlib.Path) -> None:
    shard = sorted(write_shards(tmp_path).values())[1]
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointFormatError, match=f"{shard}, which is missing"):
        open_checkpoint(tmp_path)


def test_index_names_a_missing_tensor(tmp_path: pathlib.Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "lm_head.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointFormatError, match=r"holds lm_head\.weight; it does not"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"w": 3}, {"w": "../../other.safetensors"}])
def test_nonsense_index(tmp_path: pathlib.Path, weight_map: Any) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointFormatError, match="no weight_map"):
        open_checkpoint(tmp_path)


def test_unknown_tensor(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no tensor lm_head\.weight"):
        open_checkpoint(write_folder(tmp_path)).read("lm_head.weight")


def test_missing_and_damaged_config(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointFormatError, match=r"config\.json is not JSON"):
        assert open_checkpoint(folder).config
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json does not exist"):
        assert open_checkpoint(folder).config
