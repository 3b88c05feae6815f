"""Named products with shapes from real models, for tests and benchmarks alike.

A case is sizes; `make_inputs` fills them with random numbers. Every case runs with every scheme
whose groups fill its rows. `SMALL` are twins for tests: the same kinds of sizes, fewer weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.quantize import quantize
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight, Scheme

#: Rows of x that benchmarks run: decoding alone and together, and chunks of prompts.
ROWS = (1, 8, 32, 128, 512)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """x [rows, in_size] times weight [out_size, in_size] transposed."""

    name: str
    rows: int
    out_size: int
    in_size: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.out_size * self.in_size

    def weight_bytes(self, scheme: Scheme) -> int:
        """Bytes of the weight, scales and zero points included."""
        return round(self.out_size * self.in_size * scheme.bytes_per_weight(self.in_size))

    def fits(self, scheme: Scheme) -> bool:
        """Whether the scheme's groups fill the rows."""
        return self.in_size % scheme.group_size(self.in_size) == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call: x [M, K], and the weight in the natural layout."""

    x: jax.Array
    weight: QuantizedWeight


#: Products of a layer: name, out, in. Query, key and value, and gate and up, are one product each.
SMOLLM2_135M = (
    ("qkv", 960, 576),
    ("out", 576, 576),
    ("gate-up", 3072, 576),
    ("down", 576, 1536),
    ("head", 49152, 576),
)
GEMMA3_270M = (
    ("qkv", 1536, 640),
    ("out", 640, 1024),
    ("gate-up", 4096, 640),
    ("down", 640, 2048),
    ("head", 262144, 640),
)
LLAMA_8B = (
    ("qkv", 6144, 4096),
    ("out", 4096, 4096),
    ("gate-up", 28672, 4096),
    ("down", 4096, 14336),
    ("head", 128256, 4096),
)
MODELS = {"smollm2": SMOLLM2_135M, "gemma-3-270m": GEMMA3_270M, "llama-3.1-8b": LLAMA_8B}

#: Full sizes, for benchmarks.
FULL: tuple[Case, ...] = tuple(
    Case(name=f"{model}-{part}-{rows}", rows=rows, out_size=out_size, in_size=in_size)
    for model, parts in MODELS.items()
    for part, out_size, in_size in parts
    for rows in ROWS
)


def _small(name: str, rows: int, out_size: int, in_size: int) -> Case:
    return Case(name=name, rows=rows, out_size=out_size, in_size=in_size)


#: Scaled-down twins and the odd ends, for tests.
SMALL: tuple[Case, ...] = (
    _small("decode", 1, 192, 576),
    _small("decode-8", 8, 96, 576),
    _small("rows-3", 3, 64, 128),
    _small("rows-13", 13, 48, 256),
    _small("chunk", 70, 80, 192),
    _small("long-rows", 5, 32, 1536),
    _small("head", 4, 1008, 64),
    _small("one-panel", 2, 16, 32),
    _small("one-group", 9, 32, 64),
    _small("wide", 130, 160, 128),
)
#: Sizes that only the definition must do: outputs and rows that fill no vector.
ODD: tuple[Case, ...] = (
    _small("odd-outputs", 3, 37, 64),
    _small("odd-inputs", 3, 16, 34),
    _small("one-output", 1, 1, 32),
    _small("no-rows", 0, 16, 32),
)


def make_inputs(
    case: Case, scheme: Scheme, *, dtype: DTypeLike = jnp.float32, seed: int = 0
) -> Inputs:
    """Random arguments; equal seeds give equal values.

    Rows and columns differ in size, as in real models: one column of x in eight is ten times the
    others, one row of the weight is zero, and the mean of weights is not quite zero.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.in_size), np.float32)
    x[:, ::8] *= 10
    weight = rng.standard_normal((case.out_size, case.in_size), np.float32) + np.float32(0.3)
    weight *= np.exp(rng.standard_normal((case.out_size, 1), np.float32)) * np.float32(0.02)
    weight[case.out_size // 2] = 0
    return Inputs(x=jnp.asarray(x, dtype), weight=quantize(weight, scheme))
