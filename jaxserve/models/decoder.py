"""The decoder that serves all Llama-like families (step 6).

Token ids and positions go in, hidden states come out; what attention remembers is the business
of the `Attend` that the caller passes. The module must not know files, pages or requests.

Layers are unrolled: on a CPU a scan over stacked layers would copy each layer's weights per
step. A scan for accelerators needs no other model: parameters of equal layers can be stacked
along a new leading axis, the body is `Block`, the pool of pages is carried (`PagedAttend` already
keeps one flat pool, with block tables shifted by a layer number that may be traced), and what
differs by layer (window, rope) either splits the scan into groups or becomes a scanned array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.config import ModelConfig
from jaxserve.layers.attention import Attend, Attention
from jaxserve.layers.ffn import FeedForward
from jaxserve.layers.linear_maker import LinearMaker
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import Rotation, make_rotations
from jaxserve.quantization.weights import Quantization, WeightFormat


class Block(nnx.Module):  # type: ignore[misc]
    """Attention and feed-forward layer, each normed before (and, in Gemma, after) and added."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        form: WeightFormat | None = None,
    ) -> None:
        def make_norm() -> RMSNorm:
            return make_hidden_norm(config, rngs)

        self.attention_norm = make_norm()
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs, form=form)
        self.ffn_norm = make_norm()
        self.ffn = FeedForward(
            config.hidden_size,
            config.ffn_size,
            activation=config.activation,
            use_bias=config.ffn_bias,
            dtype=dtype,
            rngs=rngs,
            form=form,
        )
        self.post_attention_norm = make_norm() if config.post_norms else None
        self.post_ffn_norm = make_norm() if config.post_norms else None

    def __call__(self, hidden: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """hidden [T, D] -> [T, D]."""
        with jax.named_scope("attention"):
            change = self.attention(self.attention_norm(hidden), rotation, attend)
            if self.post_attention_norm is not None:
                change = self.post_attention_norm(change)
            hidden = hidden + change
        with jax.named_scope("ffn"):
            change = self.ffn(self.ffn_norm(hidden))
            if self.post_ffn_norm is not None:
                change = self.post_ffn_norm(change)
            return hidden + change


def make_hidden_norm(config: ModelConfig, rngs: nnx.Rngs | None) -> RMSNorm:
    """A norm over the residual stream [.., D]."""
    return RMSNorm(
        config.hidden_size,
        eps=config.norm_eps,
        offset=config.norm_offset,
        axis="embed",
        rngs=rngs,
    )


class Decoder(nnx.Module):  # type: ignore[misc]
    """The whole model. Parameters carry `logical_axes` (see `jaxserve.parallel.mesh`).

    dtype: of weights and activations; norms, rotations, softmax and logits are float32.
    rngs None gives the abstract decoder: shapes, dtypes and axes, no arrays (what `nnx.eval_shape`
    would give, without the seconds that tracing every initialiser takes). quantization None:
    weights are of `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        form = None if quantization is None else quantization.layers
        make = LinearMaker(
            dtype=dtype, rngs=rngs, form=None if quantization is None else quantization.embedding
        )
        self.embed = make.embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(
            [
                Block(config, layer, dtype=dtype, rngs=rngs, form=form)
                for layer in range(config.num_layers)
            ]
        )
        self.final_norm = make_hidden_norm(config, rngs)
        self.lm_head = (
            None if config.tie_embeddings else make.embedding(config.vocab_size, config.hidden_size)
        )

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """token_ids and positions [T] int32 -> final hidden states [T, D], normed."""
        with jax.named_scope("embed"):
            hidden = self.embed(token_ids)
            if self.config.embedding_scale != 1.0:
                hidden = hidden * jnp.asarray(self.config.embedding_scale, hidden.dtype)
        with jax.named_scope("rope"):
            rotations = make_rotations([layer.rope for layer in self.config.layers], positions)
        for number, (block, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            with jax.named_scope(f"layer_{number}"):
                hidden = block(hidden, rotation, attend)
        with jax.named_scope("final_norm"):
            return self.final_norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D], as returned by the call -> float32 [R, V], soft-capped where the model is."""
        with jax.named_scope("logits"):
            out = (self.embed if self.lm_head is None else self.lm_head).logits(hidden)
            cap = self.config.final_soft_cap
            return out if cap is None else cap * jnp.tanh(out / cap)
