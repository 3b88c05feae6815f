"""Gemma 2 and 3 (text): norms around both halves of a block, 1 + w norms, scaled embeddings,
sliding and full layers in a pattern; Gemma 3 with a rope per layer type and normed q and k."""

from __future__ import annotations

import dataclasses
from typing import Any

from checkpoints.reader import CheckpointReader
from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.models import gguf_config, hf_config
from jaxserve.models.families.family import Family
from jaxserve.models.fields import Fields
from jaxserve.models.hf_config import FULL, SLIDING
from jaxserve.models.sources import GGUF_NAMES, HF_NAMES, Source

#: In Gemma 3 every sixth layer sees everything; the local rope is not stretched.
GEMMA3_PATTERN = 6
GEMMA3_LOCAL_THETA = 10_000.0

NAMES = dataclasses.replace(
    HF_NAMES,
    parts={
        **HF_NAMES.parts,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    },
)


def _read_common(fields: Fields) -> dict[str, Any]:
    shared = hf_config.read_shared(fields)
    shared["head_size"] = fields.integer("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    if fields.get("use_bidirectional_attention"):
        raise fields.unsupported("use_bidirectional_attention", True, ("false",))
    return {
        **shared,
        **_common(shared["hidden_size"]),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.boolean("tie_word_embeddings", True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "activation": hf_config.read_activation(
            fields, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": fields.optional_number("attn_logit_softcapping"),
        "final_soft_cap": fields.optional_number("final_logit_softcapping"),
    }


def _common(hidden_size: int) -> dict[str, Any]:
    return {"norm_offset": 1.0, "post_norms": True, "embedding_scale": hidden_size**0.5}


def read_gemma2(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "gemma2": even layers slide, soft caps."""
    fields = hf_config.open_fields(reader.config)
    common = _read_common(fields)
    if not fields.has("attn_logit_softcapping"):
        common["attention_soft_cap"] = 50.0
    if not fields.has("final_logit_softcapping"):
        common["final_soft_cap"] = 30.0
    max_position = fields.integer("max_position_embeddings", 8192)
    rope = hf_config.read_rope(
        fields, head_size=common["head_size"], max_position=max_position, theta=10_000.0
    )
    types = hf_config.read_layer_types(fields, common["num_layers"]) or [
        FULL if layer % 2 else SLIDING for layer in range(common["num_layers"])
    ]
    window = fields.integer("sliding_window", 4096)
    return ModelConfig(
        **common,
        family="gemma2",
        max_position=max_position,
        layers=hf_config.make_layers(types, {SLIDING: rope, FULL: rope}, window),
    )


def read_gemma3(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "gemma3_text"."""
    fields = hf_config.open_fields(reader.config)
    common = _read_common(fields)
    head_size = common["head_size"]
    max_position = fields.integer("max_position_embeddings", 131_072)
    if fields.get("rope_parameters") is None:
        local = RopeConfig(
            theta=fields.number("rope_local_base_freq", GEMMA3_LOCAL_THETA), rotary_dim=head_size
        )
    else:
        local = hf_config.read_rope(
            fields,
            head_size=head_size,
            max_position=max_position,
            theta=GEMMA3_LOCAL_THETA,
            layer_type=SLIDING,
        )
    full = hf_config.read_rope(
        fields, head_size=head_size, max_position=max_position, theta=1e6, layer_type=FULL
    )
    pattern = fields.integer(
        "sliding_window_pattern", fields.integer("_sliding_window_pattern", GEMMA3_PATTERN)
    )
    types = hf_config.read_layer_types(fields, common["num_layers"])
    if types is None:
        types = gemma3_layer_types(common["num_layers"], pattern)
    return ModelConfig(
        **common,
        family="gemma3_text",
        max_position=max_position,
        layers=hf_config.make_layers(
            types, {SLIDING: local, FULL: full}, fields.integer("sliding_window", 4096)
        ),
        qk_norm=True,
    )


def gemma3_layer_types(num_layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer is full, the others slide."""
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]


def read_gguf_gemma3(reader: CheckpointReader) -> ModelConfig:
    """GGUF of architecture "gemma3"; pattern and local rope are constants there, not metadata."""
    fields = gguf_config.open_fields(reader)
    shared = gguf_config.read_shared(reader, fields)
    head_size = shared["head_size"]
    full = gguf_config.read_rope(reader, fields, head_size=head_size)
    local = RopeConfig(
        theta=fields.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA), rotary_dim=head_size
    )
    # The 27B model (62 layers) scales by its width per head; llama.cpp knows it by the layers.
    scalar = (
        shared["hidden_size"] / shared["num_heads"] if shared["num_layers"] == 62 else head_size
    )
    return ModelConfig(
        **shared,
        **_common(shared["hidden_size"]),
        family="gemma3_text",
        layers=hf_config.make_layers(
            gemma3_layer_types(shared["num_layers"], GEMMA3_PATTERN),
            {SLIDING: local, FULL: full},
            fields.integer("attention.sliding_window"),
        ),
        qk_norm=True,
        activation="gelu_tanh",
        attention_scale=scalar**-0.5,
        final_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def adapt_gguf(config: ModelConfig, path: str, source: Source) -> Source:
    """llama.cpp stores this family's norm weights plus one."""
    del config
    if path.endswith("norm.weight"):
        return dataclasses.replace(source, add=-1.0)
    return source


HF = {
    "gemma2": Family(read_config=read_gemma2, names=NAMES),
    "gemma3_text": Family(read_config=read_gemma3, names=NAMES),
}
GGUF = {"gemma3": Family(read_config=read_gguf_gemma3, names=GGUF_NAMES, adapt=adapt_gguf)}
