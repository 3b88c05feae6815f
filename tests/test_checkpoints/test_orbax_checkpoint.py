"""Orbax checkpoints: conversion from every kind, slices, shardings, and damage."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from checkpoints import orbax_writer
from checkpoints.assets import read_config, read_tokenizer_files
from checkpoints.convert import convert
from checkpoints.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from checkpoints.open import open_checkpoint
from checkpoints.orbax_reader import OrbaxReader
from checkpoints.reader import TokenizerFiles

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "model.embed_tokens.weight": RANDOM.normal(size=(16, 8)).astype(np.float32),
    "model.layers.0.q_proj.weight": RANDOM.normal(size=(8, 8)).astype(ml_dtypes.bfloat16),
    "model.layers.0.scale": np.array(3.5, np.float32),
    "model.layers.0.f8": RANDOM.normal(size=(3, 5)).astype(ml_dtypes.float8_e4m3fn),
    "model.steps": np.arange(4, dtype=np.int32),
}
TOKENIZER = TokenizerFiles(
    sentencepiece_model=b"\x00\xff", chat_template="a\r\n{{ b }}", special={"bos_token": "<s>"}
)
CONFIG = {"model_type": "llama", "generation_config": {"eos_token_id": [2]}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("orbax") / "model"
    write(folder)
    return folder


def write(folder: pathlib.Path, **changes: Any) -> None:
    values: dict[str, Any] = {
        "convention": "hf",
        "config": CONFIG,
        "tensors": WEIGHTS.items(),
        "tokenizer": TOKENIZER,
    }
    orbax_writer.write_checkpoint(folder, **{**values, **changes})


def test_round_trip(written: pathlib.Path) -> None:
    reader = open_checkpoint(written)
    assert reader.convention == "hf"
    assert reader.config == read_config(written) == CONFIG
    assert reader.tokenizer_files() == read_tokenizer_files(written) == TOKENIZER
    assert set(reader.tensors) == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        read = reader.read(name)
        assert reader.tensors[name].dtype == read.dtype.name == array.dtype.name
        np.testing.assert_array_equal(read, array)


def test_no_file_tells_where_it_was_written(written: pathlib.Path) -> None:
    place = str(written.parent).encode()
    told = [path for path in written.rglob("*") if path.is_file() and place in path.read_bytes()]
    assert told == []


@pytest.mark.parametrize(
    "index",
    [
        [slice(2, 9)],
        [slice(14, 1, -4), slice(None, None, 3)],
        [slice(None), slice(-3, None)],
        [slice(4, 4)],
        [slice(None, None, -1)],
    ],
)
def test_slices_are_numpys(written: pathlib.Path, index: list[slice]) -> None:
    name = "model.embed_tokens.weight"
    read = open_checkpoint(written).read(name, index)
    np.testing.assert_array_equal(read, WEIGHTS[name][tuple(index)])


def test_restore_into_shardings_and_dtypes(written: pathlib.Path) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    split = NamedSharding(mesh, PartitionSpec("model", "data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    wanted = {
        "model.layers.0.q_proj.weight": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split),
        "model.embed_tokens.weight": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=split),
        "model.layers.0.scale": jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere),
        "model.steps": jax.ShapeDtypeStruct((4,), jnp.int32),
    }
    arrays = OrbaxReader(written).restore(wanted)
    assert list(arrays) == list(wanted)
    for name, abstract in wanted.items():
        assert arrays[name].dtype == abstract.dtype
        np.testing.assert_array_equal(arrays[name], WEIGHTS[name].astype(abstract.dtype))
        if abstract.sharding is not None:
            assert arrays[name].sharding == abstract.sharding
    embedding = arrays["model.embed_tokens.weight"]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(8, 4)}
    assert len({shard.device for shard in embedding.addressable_shards}) == 4


def test_restore_names_what_does_not_fit(written: pathlib.Path) -> None:
    reader = OrbaxReader(written)
    with pytest.raises(CheckpointFormatError, match=r"no tensor lm_head\.weight"):
        reader.restore({"lm_head.weight": jax.ShapeDtypeStruct((4,), jnp.float32)})
    with pytest.raises(CheckpointFormatError, match=r"model\.steps has shape \(4,\), \(5,\) was"):
        reader.restore({"model.steps": jax.ShapeDtypeStruct((5,), jnp.float32)})
    with pytest.raises(CheckpointNotFoundError, match="no tensor x"):
        reader.read("x")


def test_several_groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_writer, "GROUP_BYTES", 600)
    write(tmp_path / "model")
    groups = sorted(path.name for path in (tmp_path / "model" / "weights").iterdir())
    assert groups == ["group_00000", "group_00001"]
    reader = OrbaxReader(tmp_path / "model")
    wanted = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in WEIGHTS.items()}
    for name, array in reader.restore(wanted).items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
        np.testing.assert_array_equal(reader.read(name), WEIGHTS[name])


def make_gguf(path: pathlib.Path) -> pathlib.Path:
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "Ġb", "\u2028", '"'])
    writer.add_token_scores([0.1, float("-inf"), 1e-30, -3.0])
    writer.add_token_merges(["a b", "Ġ b"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}\n{% endfor %}")
    blocks = gguf.quants.quantize(RANDOM.normal(size=(6, 64)).astype(np.float32), kind)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_convert_gguf_and_forget_the_source(tmp_path: pathlib.Path) -> None:
    path = make_gguf(tmp_path / "x.gguf")
    source = open_checkpoint(path)
    convert(source, tmp_path / "out", progress=False)
    config, files = source.config, source.tokenizer_files()
    values = {name: source.read(name) for name in source.tensors}
    path.unlink()
    reader = open_checkpoint(tmp_path / "out")
    assert reader.convention == "gguf"
    assert reader.config == config
    assert reader.tokenizer_files() == read_tokenizer_files(tmp_path / "out") == files
    for name, array in values.items():
        np.testing.assert_array_equal(reader.read(name), array)
    assert reader.tensors["token_embd.weight"].dtype == "float32"


def test_convert_hugging_face_to_another_dtype(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(
        {"w": np.array([1.0, 1.001], np.float32), "ids": np.array([7], np.int64)},
        source / "model.safetensors",
    )
    (source / "config.json").write_text('{"model_type": "llama"}')
    convert(open_checkpoint(source), tmp_path / "out", dtype="bfloat16", progress=False)
    reader = open_checkpoint(tmp_path / "out")
    assert {n: i.dtype for n, i in reader.tensors.items()} == {"w": "bfloat16", "ids": "int64"}
    np.testing.assert_array_equal(reader.read("w"), np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(CheckpointNotFoundError):  # the source had no tokeniser
        reader.tokenizer_files()
    with pytest.raises(CheckpointError, match="dtype is 'int4'"):
        convert(open_checkpoint(source), tmp_path / "other", dtype="int4")


def test_existing_target_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(CheckpointError, match="exists already"):
            write(tmp_path / name)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").tensors
    assert (tmp_path / "full" / "mine.txt").exists()


def test_a_failure_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def broken() -> Iterator[tuple[str, np.ndarray]]:
        yield "a", np.ones(3, np.float32)
        raise CheckpointFormatError("the source ends here")

    with pytest.raises(CheckpointFormatError, match="ends here"):
        write(tmp_path / "model", tensors=broken())
    with pytest.raises(CheckpointFormatError, match="cannot be empty"):
        write(tmp_path / "model", tensors=[("a", np.ones((0, 3), np.float32))])
    assert list(tmp_path.iterdir()) == []


def edit_manifest(folder: pathlib.Path, **changes: Any) -> None:
    path = folder / "jaxserve.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "'other'"),
        ({"convention": "ggml"}, "convention 'ggml'"),
        ({"tensors": {"w": {"shape": [2], "dtype": "float32", "group": 9}}}, "group 9"),
        ({"tensors": {"w": {"shape": [2], "dtype": "int3x", "group": 0}}}, "int3x"),
        ({"tensors": {"w": {"shape": "2", "dtype": "float32", "group": 0}}}, "damaged"),
    ],
)
def test_nonsense_manifest(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    folder = tmp_path / "model"
    write(folder)
    edit_manifest(folder, **changes)
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(folder)


def test_manifest_that_contradicts_the_weights(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "model")
    for name, shape in (("model.steps", [5]), ("unknown", [4])):
        edit_manifest(
            tmp_path / "model", tensors={name: {"shape": shape, "dtype": "int32", "group": 0}}
        )
        reader = OrbaxReader(tmp_path / "model")
        wanted = {name: jax.ShapeDtypeStruct(tuple(shape), jnp.int32)}
        for use in (lambda r=reader, n=name: r.read(n), lambda r=reader, w=wanted: r.restore(w)):
            with pytest.raises(CheckpointFormatError) as caught:
                use()
            assert "\n" not in str(caught.value)


def test_damaged_weights(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "model")
    files = [p for p in (tmp_path / "model" / "weights").rglob("d/*") if p.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reader = OrbaxReader(tmp_path / "model")
    with pytest.raises(CheckpointFormatError, match=r"model\.steps cannot be read"):
        reader.read("model.steps")
    with pytest.raises(CheckpointFormatError, match="group 0 cannot be read"):
        reader.restore({"model.steps": jax.ShapeDtypeStruct((4,), jnp.int32)})
