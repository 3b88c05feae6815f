"""How one token of one head lies in the 128 lanes of a TPU's memory (step 6b).

A TPU stores the last axis in rows of 128 lanes; a shorter axis takes 128 lanes all the same, and
XLA then copies the whole pool to give it another form. So pages on a TPU fill their lanes:

    H = 64            two tokens share a row: [P, K, page_size / 2, 128], which is the general
                      layout [P, K, page_size, 64] read in the same order
    H = 128, 256      as everywhere: [P, K, page_size, H]
    other H           [P, K, page_size, 128 or 256], zeros behind each head

Pages of 8 bits have a scale per token and head. Those of a page and head fill one row of lanes,
[P, K, 1, max(128, page_size)], which is what one copy can fetch; a page of fewer than 128 tokens
repeats them until the row is full. Where two tokens share a row, those of the first of each pair
come before those of the second. So a token's scale of one head takes, beside the H bytes of
its key or value,

    page size     16    32    64   128   256
    bytes         32    16     8     4     4

Must not know the kernel.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

LANES = 128
#: Head sizes that were compiled for TPUs and tested.
HEAD_SIZES = (64, 80, 96, 128, 256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """`pack` tokens of one head share a row of `lanes` lanes."""

    head_size: int
    pack: int
    lanes: int


def token_layout(head_size: int) -> TokenLayout:
    """The layout for a head size among HEAD_SIZES."""
    assert head_size in HEAD_SIZES, head_size
    pack = LANES // head_size
    lanes = LANES if pack else -(-head_size // LANES) * LANES
    return TokenLayout(head_size=head_size, pack=max(1, pack), lanes=lanes)


def page_shape(
    num_pages: int, num_kv_heads: int, page_size: int, head_size: int
) -> tuple[int, int, int, int]:
    """Shape of one leaf of a pool of pages on TPUs; axes 0 and 1 are pages and KV heads."""
    layout = token_layout(head_size)
    return num_pages, num_kv_heads, page_size // layout.pack, layout.lanes


def scale_lanes(page_size: int) -> int:
    """Lanes of the row that holds the scales of one page and head."""
    return max(LANES, page_size)


def scale_shape(
    num_pages: int, num_kv_heads: int, page_size: int, head_size: int
) -> tuple[int, int, int, int]:
    """Shape of one leaf of scales (float32) of a pool of 8-bit pages, whatever the head size."""
    del head_size
    return num_pages, num_kv_heads, 1, scale_lanes(page_size)


def to_lanes(x: jax.Array, layout: TokenLayout) -> jax.Array:
    """[.., H] -> [.., lanes]: the head once in each of the `pack` parts, zeros where H is short."""
    parts = jnp.concatenate([x] * layout.pack, axis=-1)
    missing = layout.lanes - parts.shape[-1]
    return jnp.pad(parts, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def to_pages(leaf: jax.Array) -> jax.Array:
    """A pool's leaf [P, K, page_size, H] in the layout of TPUs."""
    num_pages, num_kv_heads, page_size, head_size = leaf.shape
    layout = token_layout(head_size)
    missing = layout.lanes // layout.pack - head_size
    padded = jnp.pad(leaf, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return padded.reshape(page_shape(num_pages, num_kv_heads, page_size, head_size))


def from_pages(leaf: jax.Array, head_size: int) -> jax.Array:
    """The inverse of `to_pages`."""
    layout = token_layout(head_size)
    num_pages, num_kv_heads, rows, lanes = leaf.shape
    tokens = leaf.reshape(num_pages, num_kv_heads, rows * layout.pack, lanes // layout.pack)
    return tokens[..., :head_size]


def to_scales(leaf: jax.Array, head_size: int) -> jax.Array:
    """A pool's scales [P, K, page_size] in the layout of TPUs."""
    num_pages, num_kv_heads, page_size = leaf.shape
    pack = token_layout(head_size).pack
    parts = leaf.reshape(num_pages, num_kv_heads, page_size // pack, pack).swapaxes(2, 3)
    row = parts.reshape(num_pages, num_kv_heads, 1, page_size)
    return jnp.tile(row, scale_lanes(page_size) // page_size)


def from_scales(leaf: jax.Array, page_size: int, head_size: int) -> jax.Array:
    """The inverse of `to_scales`; of copies, the first counts."""
    num_pages, num_kv_heads = leaf.shape[:2]
    pack = token_layout(head_size).pack
    parts = leaf[..., :page_size].reshape(num_pages, num_kv_heads, pack, page_size // pack)
    return parts.swapaxes(2, 3).reshape(num_pages, num_kv_heads, page_size)
