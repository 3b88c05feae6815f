"""Qwen 2 and 3 (dense): q, k and v biases in the second, normed q and k in the third."""

from __future__ import annotations

from checkpoints.reader import CheckpointReader
from jaxserve.config import ModelConfig
from jaxserve.models import hf_config
from jaxserve.models.families.family import Family
from jaxserve.models.fields import Fields
from jaxserve.models.hf_config import FULL, SLIDING
from jaxserve.models.sources import HF_NAMES


def read_qwen2(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "qwen2"."""
    return _read(hf_config.open_fields(reader.config), family="qwen2")


def read_qwen3(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "qwen3"."""
    return _read(hf_config.open_fields(reader.config), family="qwen3")


def _read(fields: Fields, *, family: str) -> ModelConfig:
    shared = hf_config.read_shared(fields)
    if family == "qwen3":
        shared["head_size"] = fields.integer("head_dim", 128)
    max_position = fields.integer("max_position_embeddings", 32_768)
    rope = hf_config.read_rope(
        fields, head_size=shared["head_size"], max_position=max_position, theta=10_000.0
    )
    slides = fields.boolean("use_sliding_window", False)
    types = hf_config.read_layer_types(fields, shared["num_layers"])
    if types is None:
        first = fields.integer("max_window_layers", 28)
        types = [
            SLIDING if slides and layer >= first else FULL for layer in range(shared["num_layers"])
        ]
    bias = True if family == "qwen2" else fields.boolean("attention_bias", False)
    return ModelConfig(
        **shared,
        family=family,
        max_position=max_position,
        layers=hf_config.make_layers(
            types, {SLIDING: rope, FULL: rope}, fields.optional_integer("sliding_window")
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=bias,
        attention_out_bias=bias and family == "qwen3",
        qk_norm=family == "qwen3",
        activation=hf_config.read_activation(fields, "hidden_act", default="silu"),
    )


HF = {
    "qwen2": Family(read_config=read_qwen2, names=HF_NAMES),
    "qwen3": Family(read_config=read_qwen3, names=HF_NAMES),
}
