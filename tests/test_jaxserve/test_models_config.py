"""Reading configurations: what is wrong or unknown is said in one line."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from model_steps import ChangedConfig, open_golden

from checkpoints.errors import CheckpointError
from checkpoints.reader import CheckpointReader
from jaxserve.errors import ModelFormatError, UnsupportedModelError
from jaxserve.models.registry import read_model_config


@pytest.fixture
def llama(golden: pathlib.Path) -> CheckpointReader:
    return open_golden(golden / "b" / "llama")


def change(reader: CheckpointReader, **changes: Any) -> ChangedConfig:
    config = {**reader.config, **changes}
    return ChangedConfig(reader, {key: value for key, value in config.items() if value != "gone"})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mamba2"}, UnsupportedModelError, r"'mamba2' .* gemma3_text, llama"),
        ({"model_type": "gone"}, ModelFormatError, "model_type"),
        ({"hidden_size": "gone"}, ModelFormatError, "hidden_size is missing"),
        ({"hidden_size": -3}, ModelFormatError, "hidden_size is -3"),
        ({"hidden_size": "wide"}, ModelFormatError, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 4}, ModelFormatError, "6 query heads .* 4 key-value heads"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, "hidden_act is 'relu6'.* silu"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "awq"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}},
            UnsupportedModelError,
            "rope_type is 'dynamic'.* yarn",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}},
            ModelFormatError,
            "factor is missing",
        ),
        ({"head_dim": 9}, ModelFormatError, "9 of 9 dimensions"),
        ({"eos_token_id": 307}, ModelFormatError, "307"),
        ({"tie_word_embeddings": 1}, ModelFormatError, "tie_word_embeddings is 1"),
    ],
)
def test_faults(
    llama: CheckpointReader, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as found:
        read_model_config(change(llama, **changes))
    assert "\n" not in str(found.value)


def test_longrope_is_refused_by_name(golden: pathlib.Path) -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read_model_config(open_golden(golden / "b" / "phi3_longrope"))


def test_unknown_families_of_the_golden_set_are_refused(golden: pathlib.Path) -> None:
    for name in ("gpt2", "deepseek_v3", "cohere2"):
        with pytest.raises(UnsupportedModelError, match=name):
            read_model_config(open_golden(golden / "b" / name))


def test_generation_config_adds_end_ids(llama: CheckpointReader) -> None:
    changed = change(llama, generation_config={"eos_token_id": [5, 2, 7]})
    assert read_model_config(changed).eos_ids == (5, 2, 7)


def test_windows_and_ropes_of_gemma3(golden: pathlib.Path) -> None:
    config = read_model_config(open_golden(golden / "b" / "gemma3_text", "config.legacy.json"))
    assert [layer.window for layer in config.layers] == [6, 6, None, 6]
    ropes = [layer.rope for layer in config.layers]
    assert [rope.theta for rope in ropes if rope] == [700.0, 700.0, 90_000.0, 700.0]
    assert [rope.scaling_type for rope in ropes if rope] == ["default"] * 2 + ["linear", "default"]
    without = change(open_golden(golden / "b" / "gemma3_text"), layer_types="gone")
    windows = [layer.window for layer in read_model_config(without).layers]
    assert windows == [6, 6, 6, 6]  # the pattern of six makes no layer of four full


def test_smollm2_gguf(smollm2_gguf: pathlib.Path) -> None:
    from checkpoints.open import open_checkpoint

    config = read_model_config(open_checkpoint(smollm2_gguf))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.max_position) == (49_152, 8192)
    assert config.tie_embeddings
    assert config.eos_ids == (2,)


def test_errors_belong_to_the_tree_that_the_command_line_prints() -> None:
    assert issubclass(ModelFormatError, CheckpointError)
