"""SmolLM3: Llama, but every fourth layer has no rotary embedding."""

from __future__ import annotations

from checkpoints.reader import CheckpointReader
from jaxserve.config import LayerConfig, ModelConfig
from jaxserve.models import hf_config
from jaxserve.models.families.family import Family
from jaxserve.models.hf_config import FULL, SLIDING
from jaxserve.models.sources import HF_NAMES


def read_smollm3(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "smollm3"; `no_rope_layers` holds 1 for layers that do rotate."""
    fields = hf_config.open_fields(reader.config)
    shared = hf_config.read_shared(fields)
    num_layers = shared["num_layers"]
    max_position = fields.integer("max_position_embeddings", 32_768)
    rope = hf_config.read_rope(
        fields, head_size=shared["head_size"], max_position=max_position, theta=2_000_000.0
    )
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.per_layer("no_rope_layers", num_layers) or [
        (layer + 1) % interval != 0 for layer in range(num_layers)
    ]
    types = hf_config.read_layer_types(fields, num_layers)
    if types is None:
        slides = fields.boolean("use_sliding_window", False)
        types = [SLIDING if slides and not turn else FULL for turn in rotates]
    layers = hf_config.make_layers(
        types, {SLIDING: rope, FULL: rope}, fields.optional_integer("sliding_window")
    )
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        **shared,
        family="smollm3",
        max_position=max_position,
        layers=tuple(
            LayerConfig(window=layer.window, rope=layer.rope if turn else None)
            for layer, turn in zip(layers, rotates, strict=True)
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        attention_bias=bias,
        attention_out_bias=bias,
        ffn_bias=fields.boolean("mlp_bias", False),
        activation=hf_config.read_activation(fields, "hidden_act", default="silu"),
    )


HF = {"smollm3": Family(read_config=read_smollm3, names=HF_NAMES)}
