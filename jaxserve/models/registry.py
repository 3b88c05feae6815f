"""Which architectures there are, and the step from an open checkpoint to a checked ModelConfig."""

from __future__ import annotations

from checkpoints.reader import CheckpointReader
from jaxserve.config import ModelConfig
from jaxserve.errors import ModelFormatError, UnsupportedModelError
from jaxserve.layers.ffn import ACTIVATIONS
from jaxserve.layers.rope import SCALING_TYPES
from jaxserve.models.families import gemma, llama, phi3, qwen, smollm3
from jaxserve.models.families.family import Family

#: By `model_type` of config.json.
HF_FAMILIES: dict[str, Family] = {
    **llama.HF,
    **qwen.HF,
    **smollm3.HF,
    **phi3.HF,
    **gemma.HF,
}
#: By `general.architecture` of a GGUF file.
GGUF_FAMILIES: dict[str, Family] = {**llama.GGUF, **gemma.GGUF}


def find_family(reader: CheckpointReader) -> Family:
    """The family of an open checkpoint; UnsupportedModelError names the architecture if none."""
    is_gguf = reader.convention == "gguf"
    families = GGUF_FAMILIES if is_gguf else HF_FAMILIES
    key = "general.architecture" if is_gguf else "model_type"
    name = reader.config.get(key)
    if name is None:
        where = "the GGUF metadata" if is_gguf else "config.json"
        raise ModelFormatError(f"{where} has no {key}; without it the architecture is unknown")
    if name not in families:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported "
            f"{'as GGUF' if is_gguf else 'as a Hugging Face checkpoint'}; "
            f"supported: {', '.join(sorted(families))}"
        )
    return families[name]


def read_model_config(reader: CheckpointReader) -> ModelConfig:
    """The shape of the model in an open checkpoint, checked for contradictions within itself."""
    config = find_family(reader).read_config(reader)
    check_config(config)
    return config


def check_config(config: ModelConfig) -> None:
    """Raises ModelFormatError where sizes contradict one another."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFormatError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key-value heads; "
            "the configuration contradicts itself"
        )
    for layer in config.layers:
        rope = layer.rope
        if rope is not None and (
            rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= config.head_size
        ):
            raise ModelFormatError(
                f"{rope.rotary_dim} of {config.head_size} dimensions of a head cannot be rotated; "
                "it must be an even number up to the head size"
            )
        assert rope is None or rope.scaling_type in SCALING_TYPES, rope
    assert len(config.layers) == config.num_layers, config
    assert config.activation in ACTIVATIONS, config.activation
    for token in (config.bos_id, *config.eos_ids):
        if token is not None and not 0 <= token < config.vocab_size:
            raise ModelFormatError(
                f"token id {token} (start or end of text) is not in the vocabulary "
                f"of {config.vocab_size}"
            )
