"""Llama and those that differ from it by fields only: Mistral's window, biases, rope scaling."""

from __future__ import annotations

import dataclasses

from checkpoints.reader import CheckpointReader
from jaxserve.config import LayerConfig, ModelConfig
from jaxserve.models import gguf_config, hf_config
from jaxserve.models.families.family import Family
from jaxserve.models.sources import GGUF_NAMES, HF_NAMES, Source

MISTRAL_WINDOW = 4096


def read_llama(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "llama"."""
    return _read(reader, family="llama", window=None)


def read_mistral(reader: CheckpointReader) -> ModelConfig:
    """config.json of model_type "mistral": every layer slides unless sliding_window is null."""
    window: int | None = MISTRAL_WINDOW
    fields = hf_config.open_fields(reader.config)
    if fields.has("sliding_window"):
        window = fields.optional_integer("sliding_window")
    return _read(reader, family="mistral", window=window)


def _read(reader: CheckpointReader, *, family: str, window: int | None) -> ModelConfig:
    fields = hf_config.open_fields(reader.config)
    shared = hf_config.read_shared(fields)
    max_position = fields.integer("max_position_embeddings", 2048)
    rope = hf_config.read_rope(
        fields, head_size=shared["head_size"], max_position=max_position, theta=10_000.0
    )
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        **shared,
        family=family,
        max_position=max_position,
        layers=(LayerConfig(window=window, rope=rope),) * shared["num_layers"],
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=bias,
        attention_out_bias=bias,
        ffn_bias=fields.boolean("mlp_bias", False),
        activation=hf_config.read_activation(fields, "hidden_act", default="silu"),
    )


def read_gguf(reader: CheckpointReader) -> ModelConfig:
    """GGUF of architecture "llama"; converters write Mistral's models as that, too."""
    fields = gguf_config.open_fields(reader)
    shared = gguf_config.read_shared(reader, fields)
    rope = gguf_config.read_rope(reader, fields, head_size=shared["head_size"])
    layer = LayerConfig(window=fields.optional_integer("attention.sliding_window"), rope=rope)
    tensors = reader.tensors
    return ModelConfig(
        **shared,
        family="llama",
        layers=(layer,) * shared["num_layers"],
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_up.bias" in tensors,
    )


def adapt_gguf(config: ModelConfig, path: str, source: Source) -> Source:
    """llama.cpp permutes this family's q and k rows, so that pairs to rotate are neighbours."""
    if ".inputs.q." in path or ".inputs.k." in path:
        return dataclasses.replace(source, interleaved_head=config.head_size)
    return source


HF = {
    "llama": Family(read_config=read_llama, names=HF_NAMES),
    "mistral": Family(read_config=read_mistral, names=HF_NAMES),
}
GGUF = {"llama": Family(read_config=read_gguf, names=GGUF_NAMES, adapt=adapt_gguf)}
