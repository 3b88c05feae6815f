"""The parts of GGUF metadata that many families share (keys are llama.cpp's)."""

from __future__ import annotations

from typing import Any

import numpy as np

from checkpoints.reader import CheckpointReader
from jaxserve.config import RopeConfig
from jaxserve.errors import ModelFormatError
from jaxserve.models.fields import Fields

WHERE = "GGUF metadata"
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def open_fields(reader: CheckpointReader) -> Fields:
    """The fields of the file's own architecture ("llama.block_count" and so on)."""
    architecture = reader.config.get("general.architecture")
    return Fields(reader.config, where=WHERE, prefix=f"{architecture}.")


def read_shared(reader: CheckpointReader, fields: Fields) -> dict[str, Any]:
    """ModelConfig's arguments that every family spells alike."""
    if EMBEDDING not in reader.tensors:
        raise ModelFormatError(f"tensor {EMBEDDING} is missing; the file is not a whole model")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_size = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    if fields.integer("attention.value_length", head_size) != head_size:
        raise fields.unsupported(
            "attention.value_length", fields.get("attention.value_length"), [str(head_size)]
        )
    tokens = Fields(fields.values, where=WHERE, prefix="tokenizer.ggml.")
    bos = tokens.token_ids("bos_token_id")
    ends = [token for key in END_KEYS for token in tokens.token_ids(key)]
    return {
        "vocab_size": reader.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "num_layers": fields.integer("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_size": head_size,
        "ffn_size": fields.integer("feed_forward_length"),
        "max_position": fields.integer("context_length"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in reader.tensors,
        "bos_id": bos[0] if bos else None,
        "eos_ids": tuple(dict.fromkeys(ends)),
    }


def read_rope(reader: CheckpointReader, fields: Fields, *, head_size: int) -> RopeConfig:
    """The rotary embedding; Llama 3's scaling is stored as one factor per frequency."""
    theta = fields.number("rope.freq_base", 10_000.0)
    rotary_dim = fields.integer("rope.dimension_count", head_size)
    scaling: dict[str, float | int | bool | list[float]] = {}
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise fields.unsupported("rope.scaling.type", kind, ("none", "linear", "yarn"))
    if ROPE_FACTORS in reader.tensors:
        if kind != "none":
            raise fields.fault("rope.scaling.type", f"is {kind!r} although {ROPE_FACTORS} is there")
        factors = np.asarray(reader.read(ROPE_FACTORS), np.float64)
        if factors.shape != (rotary_dim // 2,) or not (factors > 0).all():
            raise ModelFormatError(f"{ROPE_FACTORS} must hold {rotary_dim // 2} positive factors")
        kind, scaling = "factors", {"factors": factors.tolist()}
    elif kind == "linear":
        scaling = {"factor": fields.number("rope.scaling.factor")}
    elif kind == "yarn":
        scaling = {
            "factor": fields.number("rope.scaling.factor"),
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            ),
        }
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling_type="default" if kind == "none" else kind,
        scaling=scaling,
    )
