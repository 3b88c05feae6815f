"""The attention layer and the two ways in which it may look back: dense, and through pages.

Step 6 and its border to 6b. The layer makes q, k and v; an `Attend`, chosen by the caller, keeps
keys and values and answers with the attended values. The layer does not know which one it has.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.layers.linear_maker import LinearMaker
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import Rotation, apply_rope
from jaxserve.parallel.mesh import spec
from jaxserve.quantization.weights import WeightFormat
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch


class Attend(Protocol):
    """Attention of one layer. Called once per layer, in order of the layers."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """q [T, N, H], k and v [T, K, H]; sinks [N] or None. Returns [T, N, H] in q's dtype."""
        ...


class PagedAttentionOp(Protocol):
    """An implementation of `pallas_kernels.paged_attention`."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: KVPages,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPages]:
        """As `pallas_kernels.paged_attention.reference.paged_attention`."""
        ...


class DenseAttend:
    """Causal attention over the T rows of one sequence that starts at row 0.

    Keeps nothing, so it can be differentiated and mapped over a batch (`jax.vmap`). Takes
    T * T * N floats of memory: for training and tests, not for serving.
    """

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """See `Attend`; `layer` makes no difference here."""
        del layer
        num_rows, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        query = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        logits = scale * jnp.einsum(
            "tkgh,skh->kgts", query, k, precision=precision, preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        behind = jnp.arange(num_rows)[:, None] - jnp.arange(num_rows)[None, :]
        allowed = behind >= 0
        if window is not None:
            allowed &= behind < window
        logits = jnp.where(allowed, logits, -jnp.inf)
        if sinks is not None:
            column = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
            column = jnp.broadcast_to(column, (*logits.shape[:3], 1))
            logits = jnp.concatenate((logits, column), axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :num_rows].astype(v.dtype)
        out = jnp.einsum(
            "kgts,skh->tkgh", weights, v, precision=precision, preferred_element_type=jnp.float32
        )
        return out.reshape(q.shape).astype(q.dtype)


class PagedAttend:
    """Attention through one pool of pages for all layers; holds the pool while a step is traced.

    pages: leaves [L * P, K, page_size, H]; layer l owns pages l * P to (l + 1) * P - 1, so block
    tables (which count from 0 to P - 1) are shifted by l * P and page l * P is its trash page.
    One array instead of L keeps a step's arguments few, and lets a scan over stacked layers
    carry the pool without a copy. After the model has run, `pages` is the updated pool.
    op: the implementation, chosen once by `pallas_kernels.dispatch`. On a mesh of several
    devices each runs it on its own KV heads.
    """

    def __init__(
        self,
        pages: KVPages,
        batch: PagedBatch,
        mesh: Mesh,
        op: PagedAttentionOp,
        *,
        num_layers: int,
    ) -> None:
        assert pages.k.shape[0] % num_layers == 0, (pages.k.shape, num_layers)
        self.pages = pages
        self._batch = batch
        self._mesh = mesh
        self._op = op
        self._pages_per_layer = pages.k.shape[0] // num_layers

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """See `Attend`; also writes k and v into this layer's pages."""
        shifted = self._batch.block_tables + layer * self._pages_per_layer
        batch = self._batch._replace(block_tables=shifted)

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: KVPages,
            batch: PagedBatch,
            sinks: jax.Array | None,
        ) -> tuple[jax.Array, KVPages]:
            return self._op(
                q, k, v, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
            )

        query_spec = spec(("tokens", "heads", "head"))
        row_spec = spec(("tokens", "kv_heads", "head"))
        pool_spec = spec(
            ("pages", "kv_heads")
        )  # of pages and, where there are any, of their scales
        sharded = jax.shard_map(
            attend,
            mesh=self._mesh,
            in_specs=(query_spec, row_spec, row_spec, pool_spec, spec(()), spec(("heads",))),
            out_specs=(query_spec, pool_spec),
            check_vma=False,
        )
        out, self.pages = sharded(q, k, v, self.pages, batch, sinks)
        return out


class Attention(nnx.Module):  # type: ignore[misc]
    """q [N*H, D], k and v [K*H, D], o [D, N*H], optional norms over each head of q and k."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        form: WeightFormat | None = None,
    ) -> None:
        width, head_size = config.hidden_size, config.head_size
        make = LinearMaker(dtype=dtype, rngs=rngs, form=form)

        def make_norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(
                head_size, eps=config.norm_eps, offset=config.norm_offset, axis="head", rngs=rngs
            )

        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.inputs = make.several(
            tuple((name, size * head_size) for name, size in zip("qkv", sizes, strict=True)),
            width,
            out_axes=("heads", "kv_heads", "kv_heads"),
            in_axis="embed",
            use_bias=config.attention_bias,
        )
        self.o = make.one(
            width,
            config.num_heads * head_size,
            out_axis="embed",
            in_axis="heads",
            use_bias=config.attention_out_bias,
        )
        self.q_norm, self.k_norm = make_norm(), make_norm()
        self.layer = layer
        self.head_size = head_size
        self.window = config.layers[layer].window
        rope: RopeConfig | None = config.layers[layer].rope
        self.interleaved = rope is not None and rope.interleaved
        self.scale = config.attention_scale or head_size**-0.5
        self.soft_cap = config.attention_soft_cap

    def __call__(self, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [T, D] -> [T, D]; rotation None leaves q and k as they are (NoPE)."""
        q, k, v = (part.reshape(x.shape[0], -1, self.head_size) for part in self.inputs(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q = apply_rope(q, rotation, interleaved=self.interleaved)
            k = apply_rope(k, rotation, interleaved=self.interleaved)
        out = attend(
            self.layer,
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None,
        )
        return self.o(out.reshape(x.shape[0], -1))
