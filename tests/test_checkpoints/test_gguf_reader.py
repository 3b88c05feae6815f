"""GGUF files: values of every block format, slices, vocabulary, and damage of every kind."""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import time
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
)
from checkpoints.gguf_reader import GgufReader

TOKENS = ["<unk>", "<s>", "</s>", "▁a", "é", ""]


def write_gguf(
    path: pathlib.Path,
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]],
    *,
    vocabulary: bool = True,
    alignment: int | None = None,
) -> pathlib.Path:
    """A small GGUF file; a tensor with a format is given as rows of block bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("llama.attention.head_count_kv", [1, 2])
    if vocabulary:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([0.0, -1.5, float("-inf"), 0.25, 1.0, 2.0])
        writer.add_token_types([2, 3, 3, 1, 1, 1])
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages }}")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def q8_rows(seed: int, rows: int, width: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two tensors; the last ends on the alignment, so that no padding follows it."""
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf",
        {
            "plain.weight": (plain, None),
            "blocks.weight": (q8_rows(0, 16, 64), gguf.GGMLQuantizationType.Q8_0),
        },
    )


def use_everything(path: pathlib.Path) -> None:
    reader = GgufReader(path)
    assert len(reader.config) > 0
    reader.tokenizer_files()
    for name, info in reader.tensors.items():
        assert reader.read(name).shape == info.shape


def decode(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def check_blocks(path: pathlib.Path, name: str, rows: int, entry: dict[str, Any]) -> None:
    kind = gguf.GGMLQuantizationType(entry["type_id"])
    raw = decode(entry["raw_b64"], "u1").reshape(rows, -1)
    expected = decode(entry["values_f32_b64"], "<f4").reshape(rows, -1)
    file = write_gguf(path / f"{name}.gguf", {"w": (raw, kind)}, vocabulary=False)
    reader = GgufReader(file)
    assert reader.tensors["w"].shape == expected.shape
    read = reader.read("w").astype(np.float32)
    np.testing.assert_array_equal(read.view(np.uint32), expected.view(np.uint32))
    columns = reader.read("w", [slice(None), slice(5, 200, 3)]).astype(np.float32)
    np.testing.assert_array_equal(columns, expected[:, 5:200:3])


def test_every_block_format(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    formats = json.loads((data / "gguf_blocks.json").read_text())["formats"]
    assert len(formats) == 15
    for name, entry in formats.items():
        check_blocks(tmp_path, name, 1, entry)


def test_golden_blocks(golden: pathlib.Path, tmp_path: pathlib.Path) -> None:
    formats = json.loads((golden / "e" / "blocks.json").read_text())["formats"]
    for name, entry in formats.items():
        for case in entry["cases"]:
            check_blocks(tmp_path, name, entry["shape"][0], {**entry, **case})


def test_config_leaves_the_vocabulary_out(tiny: pathlib.Path) -> None:
    config = GgufReader(tiny).config
    assert config["general.architecture"] == "llama"
    assert config["llama.block_count"] == 2
    assert config["llama.rope.freq_base"] == 10000.0
    assert config["llama.attention.head_count_kv"] == [1, 2]
    assert config["tokenizer.ggml.bos_token_id"] == 1
    assert "tokenizer.ggml.tokens" not in config


def test_vocabulary(tiny: pathlib.Path) -> None:
    files = GgufReader(tiny).tokenizer_files()
    assert files.gguf_vocab is not None
    assert files.gguf_vocab["tokens"] == TOKENS
    assert files.gguf_vocab["scores"] == [0.0, -1.5, float("-inf"), 0.25, 1.0, 2.0]
    assert files.gguf_vocab["token_type"] == [2, 3, 3, 1, 1, 1]
    assert files.gguf_vocab["model"] == "llama"
    assert files.chat_template == "{{ messages }}"
    assert files.special == {
        "bos_token": "<s>",
        "bos_token_id": 1,
        "unk_token": "<unk>",
        "unk_token_id": 0,
        "add_bos_token": True,
    }


def test_no_vocabulary(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"w": (np.ones(4, np.float32), None)}, vocabulary=False)
    with pytest.raises(CheckpointNotFoundError, match="no vocabulary"):
        GgufReader(path).tokenizer_files()


def test_plain_numbers_keep_their_type(tmp_path: pathlib.Path) -> None:
    half = np.arange(8, dtype=np.float16).reshape(2, 4)
    brain = np.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16)
    kind = gguf.GGMLQuantizationType.BF16
    path = write_gguf(
        tmp_path / "x.gguf", {"half": (half, None), "brain": (brain.view(np.uint8), kind)}
    )
    reader = GgufReader(path)
    assert [info.dtype for info in reader.tensors.values()] == ["float16", "bfloat16"]
    np.testing.assert_array_equal(reader.read("half"), half)
    np.testing.assert_array_equal(reader.read("brain"), brain)


@pytest.mark.parametrize(
    "index",
    [
        [],
        [slice(1, 2)],
        [slice(None), slice(1, 3)],
        [slice(2, 9, 3), slice(40, 3, -7), slice(33, 64)],
        [slice(3, 3)],
        [slice(None, None, -1)],
        [slice(-2, None), slice(-5, -1), slice(-9, None, 2)],
    ],
)
def test_slices_are_numpys(tmp_path: pathlib.Path, index: list[slice]) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = q8_rows(1, 4 * 50, 64).reshape(4, 50, -1)
    plain = np.arange(4 * 50 * 64, dtype=np.float32).reshape(4, 50, 64)
    reader = GgufReader(write_gguf(tmp_path / "x.gguf", {"p": (plain, None), "q": (blocks, kind)}))
    values = gguf.quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(reader.read("p", index), plain[tuple(index)])
    np.testing.assert_array_equal(reader.read("q", index), values[tuple(index)])


def test_custom_alignment(tmp_path: pathlib.Path) -> None:
    values = np.arange(5, dtype=np.float32)
    path = write_gguf(
        tmp_path / "x.gguf", {"a": (values, None), "b": (values + 1, None)}, alignment=256
    )
    np.testing.assert_array_equal(GgufReader(path).read("b"), values + 1)


def test_every_truncation_is_one_clear_error(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    use_everything(tiny)
    content = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as caught:
            use_everything(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damage_never_escapes(
    tiny: pathlib.Path, tmp_path: pathlib.Path, data: st.DataObject
) -> None:
    content = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        use_everything(path)


def test_bad_magic(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointFormatError, match="does not begin with GGUF"):
        GgufReader(path)


def test_unknown_version_and_byte_order(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    content, path = tiny.read_bytes(), tmp_path / "x.gguf"
    path.write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    with pytest.raises(CheckpointFormatError, match="version 1"):
        GgufReader(path)
    path.write_bytes(content[:4] + (3).to_bytes(4, "big") + content[8:])
    with pytest.raises(CheckpointFormatError, match="big-endian"):
        GgufReader(path)


def test_unknown_tensor(tiny: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no tensor lm_head\.weight"):
        GgufReader(tiny).read("lm_head.weight")


def test_split_file_is_refused(tmp_path: pathlib.Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointFormatError, match="one of 3 parts"):
        GgufReader(tmp_path / "x.gguf")


def test_a_long_vocabulary_opens_fast(tmp_path: pathlib.Path) -> None:
    """262,144 entries: skipped when opening, decoded only when asked for."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_token_list([f"token{i}" for i in range(262_144)])
    writer.add_token_scores([float(i) for i in range(262_144)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    begin = time.process_time()
    reader = GgufReader(tmp_path / "x.gguf")
    assert len(reader.config) > 0
    assert time.process_time() - begin < 1.0
    vocab = reader.tokenizer_files().gguf_vocab
    assert vocab is not None
    assert vocab["tokens"][-1] == "token262143"
    assert time.process_time() - begin < 3.0
