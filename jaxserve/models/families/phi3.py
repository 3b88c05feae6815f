"""Phi-3: Llama with q, k, v and gate, up stored fused, and only a part of each head rotated."""

from __future__ import annotations

import dataclasses

from checkpoints.reader import CheckpointReader
from jaxserve.config import LayerConfig, ModelConfig
from jaxserve.models import hf_config
from jaxserve.models.families.family import Family
from jaxserve.models.sources import HF_NAMES, Source


def read_phi3(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "phi3" (rope scaling "longrope" is refused)."""
    fields = hf_config.open_fields(reader.config)
    shared = hf_config.read_shared(fields)
    max_position = fields.integer("max_position_embeddings", 4096)
    rope = hf_config.read_rope(
        fields, head_size=shared["head_size"], max_position=max_position, theta=10_000.0
    )
    layer = LayerConfig(window=fields.optional_integer("sliding_window"), rope=rope)
    return ModelConfig(
        **shared,
        family="phi3",
        max_position=max_position,
        layers=(layer,) * shared["num_layers"],
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        activation=hf_config.read_activation(fields, "hidden_act", default="silu"),
    )


def adapt(config: ModelConfig, path: str, source: Source) -> Source:
    """Rows of qkv_proj are q, then k, then v; those of gate_up_proj are gate, then up."""
    q_rows = config.num_heads * config.head_size
    kv_rows = config.num_kv_heads * config.head_size
    fused = {
        "attention.inputs.q.weight": ("qkv_proj", 0, q_rows + 2 * kv_rows),
        "attention.inputs.k.weight": ("qkv_proj", q_rows, q_rows + 2 * kv_rows),
        "attention.inputs.v.weight": ("qkv_proj", q_rows + kv_rows, q_rows + 2 * kv_rows),
        "ffn.inputs.gate.weight": ("gate_up_proj", 0, 2 * config.ffn_size),
        "ffn.inputs.up.weight": ("gate_up_proj", config.ffn_size, 2 * config.ffn_size),
    }
    part = ".".join(path.split(".")[-4:])
    if part not in fused:
        return source
    name, first_row, rows = fused[part]
    module = source.name.rsplit(".", 2)[0]
    return dataclasses.replace(
        source,
        name=f"{module}.{name}.weight",
        shape=(rows, *source.shape[1:]),
        first_row=first_row,
    )


HF = {"phi3": Family(read_config=read_phi3, names=HF_NAMES, adapt=adapt)}
