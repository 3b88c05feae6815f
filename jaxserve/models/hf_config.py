"""The parts of a Hugging Face config.json that many families share, in both of its spellings.

transformers 5 writes `rope_parameters` (possibly one entry per layer type); before that it was
`rope_theta` with `rope_scaling`, whose kind is called `rope_type` or, older, `type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config import LayerConfig, RopeConfig
from jaxserve.errors import ModelFormatError, UnsupportedModelError
from jaxserve.models.fields import Fields

WHERE = "config.json"
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def open_fields(config: Mapping[str, Any]) -> Fields:
    """The fields of a config.json; quantised checkpoints are refused."""
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{WHERE}: quantised weights ({method}) are not supported; "
            "use the float checkpoint or a GGUF file"
        )
    return Fields(config, where=WHERE)


def read_shared(fields: Fields) -> dict[str, Any]:
    """ModelConfig's arguments that every family spells alike."""
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.fault("num_attention_heads", f"({num_heads}) does not divide {hidden_size}")
    bos = fields.token_ids("bos_token_id")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_size": fields.integer("head_dim", hidden_size // num_heads),
        "ffn_size": fields.integer("intermediate_size"),
        "bos_id": bos[0] if bos else None,
        "eos_ids": read_eos_ids(fields),
    }


def read_eos_ids(fields: Fields) -> tuple[int, ...]:
    """End ids of generation_config.json (instruct models end turns with another id) and config.json."""
    generation = Fields(fields.get("generation_config") or {}, where="generation_config.json")
    ids = (*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def read_activation(fields: Fields, *keys: str, default: str) -> str:
    """Our name of the activation under the first of the keys that is there."""
    key = next((key for key in keys if fields.get(key) is not None), keys[0])
    name = fields.text(key, default)
    if name not in ACTIVATIONS:
        raise fields.unsupported(key, name, tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


def read_layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """`layer_types`, checked; None when the file does not give them."""
    types = fields.per_layer("layer_types", num_layers)
    for kind in types or []:
        if kind not in (SLIDING, FULL):
            raise fields.unsupported("layer_types", kind, (SLIDING, FULL))
    return types


def read_rope(
    fields: Fields,
    *,
    head_size: int,
    max_position: int,
    theta: float,
    layer_type: str | None = None,
) -> RopeConfig:
    """The rotary embedding, of one layer type where they differ. theta: the family's default."""
    parameters = fields.get("rope_parameters")
    if parameters is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    if parameters is None:
        parameters = fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise fields.fault("rope_scaling", f"is {parameters!r}; it must be an object")
    rope = Fields(parameters, where=f"{WHERE}: rope_parameters")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    kind, scaling = read_rope_scaling(rope, max_position=max_position)
    return RopeConfig(
        theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        rotary_dim=int(head_size * share),
        scaling_type=kind,
        scaling=scaling,
    )


def read_rope_scaling(
    rope: Fields, *, max_position: int
) -> tuple[str, dict[str, float | int | bool | list[float]]]:
    """Kind of scaling and its numbers."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    scaling: dict[str, float | int | bool | list[float]] = {}
    match kind:
        case "default":
            pass
        case "linear":
            scaling["factor"] = rope.number("factor")
        case "llama3":
            for key in ("factor", "low_freq_factor", "high_freq_factor"):
                scaling[key] = rope.number(key)
            key = "original_max_position_embeddings"
            scaling[key] = rope.integer(key)
            if scaling["low_freq_factor"] == scaling["high_freq_factor"]:
                raise rope.fault("high_freq_factor", "must not equal low_freq_factor")
        case "yarn":
            scaling["factor"] = rope.number("factor")
            key = "original_max_position_embeddings"
            scaling[key] = rope.integer(key, max_position)
            scaling["beta_fast"] = rope.number("beta_fast", 32.0)
            scaling["beta_slow"] = rope.number("beta_slow", 1.0)
            scaling["truncate"] = rope.boolean("truncate", True)
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                value = rope.optional_number(key)
                if value is not None:
                    scaling[key] = value
        case _:
            raise rope.unsupported("rope_type", kind, ROPE_TYPES)
    return kind, scaling


def make_layers(
    types: Sequence[str], ropes: Mapping[str, RopeConfig | None], window: int | None
) -> tuple[LayerConfig, ...]:
    """Layers by type: sliding ones have the window, each type its rope."""
    if SLIDING in types and window is None:
        raise ModelFormatError(f"{WHERE}: sliding_window is missing, but layers slide")
    return tuple(
        LayerConfig(window=window if kind == SLIDING else None, rope=ropes[kind]) for kind in types
    )
