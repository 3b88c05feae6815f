"""A tiny random Llama checkpoint in Hugging Face's format, for tests that need a real engine."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

VOCAB = 320


def write_tiny_llama(folder: pathlib.Path, *, seed: int = 0, **changes: object) -> pathlib.Path:
    """2 layers, 8 query and 4 key-value heads of 16; weights large enough for clear preferences."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    rng = np.random.default_rng(seed)
    width, ffn = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def weight(out: int, into: int) -> np.ndarray:
        return (rng.standard_normal((out, into)) * 1.5 / into**0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, width)).astype(np.float32),
        "lm_head.weight": weight(VOCAB, width) * 2,
        "model.norm.weight": np.ones(width, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(width, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(width, np.float32),
            prefix + "self_attn.q_proj.weight": weight(heads, width),
            prefix + "self_attn.k_proj.weight": weight(kv, width),
            prefix + "self_attn.v_proj.weight": weight(kv, width),
            prefix + "self_attn.o_proj.weight": weight(width, heads),
            prefix + "mlp.gate_proj.weight": weight(ffn, width),
            prefix + "mlp.up_proj.weight": weight(ffn, width),
            prefix + "mlp.down_proj.weight": weight(width, ffn),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
