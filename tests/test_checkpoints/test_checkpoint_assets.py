"""Choosing a reader by content, config and tokeniser files, and staying free of jax."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.assets import read_config, read_tokenizer_files
from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError
from checkpoints.open import open_checkpoint


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text('{"model": "é"}', encoding="utf-8")
    return tmp_path


def set_tokenizer_config(folder: pathlib.Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_tokenizer_json_comes_first(folder: pathlib.Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x01\x02")
    files = read_tokenizer_files(folder)
    assert files.tokenizer_json == '{"model": "é"}'
    assert files.sentencepiece_model is None
    assert files.chat_template is None
    (folder / "tokenizer.json").unlink()
    assert read_tokenizer_files(folder).sentencepiece_model == b"\x01\x02"


def test_no_tokenizer(folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no tokenizer\.json"):
        open_checkpoint(folder).tokenizer_files()


def test_special_tokens_as_text(folder: pathlib.Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<x>", "unk_token": "<unk>"}')
    set_tokenizer_config(folder, bos_token={"content": "<s>", "lstrip": False}, add_bos_token=True)
    special = read_tokenizer_files(folder).special
    assert special == {"bos_token": "<s>", "unk_token": "<unk>", "add_bos_token": True}


def test_chat_template_text(folder: pathlib.Path) -> None:
    set_tokenizer_config(folder, chat_template="{{ a }}")
    files = read_tokenizer_files(folder)
    assert files.chat_template == "{{ a }}"
    assert "chat_template" not in files.special


def test_chat_template_list(folder: pathlib.Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    set_tokenizer_config(folder, chat_template=named)
    files = read_tokenizer_files(folder)
    assert files.chat_template == "D"
    assert files.special["chat_templates"] == {"tool_use": "T", "default": "D"}


def test_chat_template_file_wins(folder: pathlib.Path) -> None:
    set_tokenizer_config(folder, chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    assert read_tokenizer_files(folder).chat_template == "new"


@pytest.mark.parametrize("template", [3, {"a": "b"}, [{"name": "default"}], ["x"]])
def test_nonsense_chat_template(folder: pathlib.Path, template: Any) -> None:
    set_tokenizer_config(folder, chat_template=template)
    with pytest.raises(CheckpointFormatError, match="chat_template"):
        read_tokenizer_files(folder)


def test_config(folder: pathlib.Path) -> None:
    assert read_config(folder) == open_checkpoint(folder).config == {"model_type": "llama"}


def test_not_utf8(folder: pathlib.Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointFormatError, match="not UTF-8"):
        read_config(folder)


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nope")


def test_not_a_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointFormatError, match="is not a model; expected a GGUF file"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointFormatError, match="is not a model"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointFormatError, match="PyTorch weights only"):
        open_checkpoint(tmp_path)


def test_empty_file(tmp_path: pathlib.Path) -> None:
    for name in ("x.gguf", "x.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointFormatError):
            open_checkpoint(tmp_path / name)


def test_several_candidates(folder: pathlib.Path) -> None:
    (folder / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointFormatError, match=r"several models \(a\.gguf, model\.safe"):
        open_checkpoint(folder)


def test_usual_name_wins_over_other_safetensors(folder: pathlib.Path) -> None:
    save_file({"other": np.ones(2, np.float32)}, folder / "consolidated.safetensors")
    assert list(open_checkpoint(folder).tensors) == ["w"]


def test_shards_without_index(tmp_path: pathlib.Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"without model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_foreign_orbax_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(CheckpointFormatError, match="not one of ours"):
        open_checkpoint(tmp_path)


def test_front_end_modules_do_not_import_jax() -> None:
    program = (
        "import sys, checkpoints.assets, checkpoints.open, checkpoints.resolve, checkpoints.validate;"
        "sys.exit(bool({'jax', 'orbax', 'flax', 'torch', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
