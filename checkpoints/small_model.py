"""The small checkpoint's model in Flax NNX, as plain as it can be: the whole sequence, no cache.

Llama's arithmetic (RMSNorm, rotary halves, grouped queries, SwiGLU, tied embeddings). It trains the
checkpoint that ships and is the independent path against which engines are checked. The served
model is another one (`jaxserve.models`), of which this module must know nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SmallConfig:
    """Sizes of the model. Heads and vocabulary can be divided by 2 and 4 for tensor parallelism."""

    vocab_size: int = 1536
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 16
    ffn_size: int = 384
    max_position: int = 1024
    rope_theta: float = 500.0
    norm_eps: float = 1e-5


def _linear(rows: int, columns: int, rngs: nnx.Rngs) -> Any:
    return nnx.Linear(rows, columns, use_bias=False, rngs=rngs)


def _embedding(key: jax.Array, shape: tuple[int, ...], dtype: Any, *_: Any) -> jax.Array:
    """Small random rows with eight dimensions in common.

    The projections have no biases: what all tokens share lets a head look at a position whatever
    the token.
    """
    rows = 0.05 * jax.random.normal(key, shape, dtype)
    return rows.at[:, :8].add(0.1)


def _residual(rows: int, columns: int, rngs: nnx.Rngs) -> Any:
    """A projection back into the stream. It begins at zero, so that the tokens stay readable there."""
    zeros = nnx.initializers.zeros
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=zeros, rngs=rngs)


def _rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H] at positions 0..T-1; pairs are (i, i + H/2)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):  # type: ignore[misc]
    """Causal self-attention; query head n reads key head n // (N / K)."""

    def __init__(self, config: SmallConfig, rngs: nnx.Rngs) -> None:
        self.head_size, self.theta = config.head_size, config.rope_theta
        width = config.num_heads * config.head_size
        kv_width = config.num_kv_heads * config.head_size
        self.q_proj = _linear(config.hidden_size, width, rngs)
        self.k_proj = _linear(config.hidden_size, kv_width, rngs)
        self.v_proj = _linear(config.hidden_size, kv_width, rngs)
        self.o_proj = _residual(width, config.hidden_size, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """[B, T, D] -> [B, T, D]; mask [B, 1, T, T] as in `SmallModel`."""
        heads = (*x.shape[:2], -1, self.head_size)
        q = _rotate(self.q_proj(x).reshape(heads), self.theta)
        k = _rotate(self.k_proj(x).reshape(heads), self.theta)
        v = self.v_proj(x).reshape(heads)
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        y: jax.Array = self.o_proj(out.reshape(*x.shape[:2], -1))
        return y


class FeedForward(nnx.Module):  # type: ignore[misc]
    """SwiGLU."""

    def __init__(self, config: SmallConfig, rngs: nnx.Rngs) -> None:
        self.gate_proj = _linear(config.hidden_size, config.ffn_size, rngs)
        self.up_proj = _linear(config.hidden_size, config.ffn_size, rngs)
        self.down_proj = _residual(config.ffn_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        y: jax.Array = self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nnx.Module):  # type: ignore[misc]
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: SmallConfig, rngs: nnx.Rngs) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nnx.RMSNorm(size, epsilon=eps, rngs=rngs)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(size, epsilon=eps, rngs=rngs)
        self.mlp = FeedForward(config, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """[B, T, D] -> [B, T, D]; mask [B, 1, T, T] as in `SmallModel`."""
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class SmallModel(nnx.Module):  # type: ignore[misc]
    """Token ids [B, T] to float32 logits [B, T, V]."""

    def __init__(self, config: SmallConfig, *, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=_embedding,
            rngs=rngs,
        )
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, rngs=rngs)

    def __call__(self, ids: jax.Array, documents: jax.Array | None = None) -> jax.Array:
        """The logits at position t are those of the token at t + 1.

        documents: numbers [B, T] when several texts stand in a row; none sees another.
        """
        mask = None
        if documents is not None:
            mask = (documents[:, :, None] == documents[:, None, :])[:, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits: jax.Array = self.embed_tokens.attend(self.norm(x))
        return logits


def _parameters(model: SmallModel) -> list[tuple[str, Any]]:
    """(Hugging Face name, parameter) of every weight; NNX calls the arrays kernel, scale, embedding."""
    return [
        (f"model.{'.'.join(str(part) for part in path[:-1])}.weight", parameter)
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]


def to_tensors(model: SmallModel) -> dict[str, np.ndarray]:
    """Float32 arrays under Hugging Face's Llama names and shapes (projections as [out, in])."""
    tensors = {}
    for name, parameter in _parameters(model):
        value = np.asarray(parameter.get_value(), np.float32)
        tensors[name] = np.ascontiguousarray(value.T) if "proj" in name else value
    return tensors


def set_tensors(model: SmallModel, tensors: Mapping[str, np.ndarray]) -> None:
    """Puts arrays named and shaped as by `to_tensors` into the model, as float32."""
    for name, parameter in _parameters(model):
        value = np.asarray(tensors[name], np.float32)
        parameter.set_value(jnp.asarray(value.T if "proj" in name else value))


def to_config(config: SmallConfig, *, bos_id: int, eos_id: int) -> dict[str, Any]:
    """config.json in the spelling of Hugging Face's Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "bfloat16",
    }
