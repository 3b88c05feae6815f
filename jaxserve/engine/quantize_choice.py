"""Which form the weights get: plain floats, or one of the schemes of `quantized_matmul` (before step 1).

On a CPU, reading the weights is what a decode step waits for, so there `auto` stores them in
few bits: as the file's own blocks where those are 4-bit blocks of 32 (their numbers fit exactly),
else in 8 bits, with activations rounded to 16 bits. On accelerators, and where --dtype or the
reference kernels are asked for, `auto` leaves weights as they are.
"""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from checkpoints.reader import CheckpointReader
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import UsageError
from jaxserve.parallel.mesh import tensor_parallel_size
from jaxserve.quantization.weights import Quantization, WeightFormat
from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.scheme import Scheme, named_scheme

logger = logging.getLogger("jaxserve.engine")

AUTO, NONE = "auto", "none"
#: What `auto` stores: blocks of 4 bits as GGUF files have them, or 8 bits.
AUTO_BLOCKS, AUTO_BYTES = "int4_group32_zero_a16", "int8_group32_a16"
#: Formats of GGUF whose numbers AUTO_BLOCKS holds exactly.
BLOCK_FORMATS = frozenset({"Q4_0", "Q4_1"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Size of one matrix as a device holds it."""

    out_size: int
    in_size: int


def choose_quantization(
    config: EngineConfig,
    model: ModelConfig,
    reader: CheckpointReader,
    mesh: Mesh,
    dtype: np.dtype,
    kernels: str,
) -> Quantization | None:
    """The formats of the weights, None for plain ones. kernels: as `dispatch.choose` takes it.

    Raises UsageError when --quantization names no scheme, or one that this model or machine cannot do.
    """
    platform = mesh.devices.flat[0].platform
    if config.quantization != AUTO:
        return named_quantization(config, model, mesh, platform, dtype, kernels)
    if platform != "cpu" or config.dtype != "auto" or kernels == dispatch.REFERENCE:
        return None
    in_blocks = _is_in_blocks(reader)
    name = AUTO_BLOCKS if in_blocks else AUTO_BYTES
    scheme = named_scheme(name)
    try:
        found = _make(scheme, model, mesh, platform, dtype, kernels, fast_only=True)
    except KernelError as error:
        logger.info("weights stay %s: %s", dtype.name, error)
        return None
    why = "the file's own 4-bit blocks" if in_blocks else "8 bits, as the file has no 4-bit blocks"
    logger.info(
        "weights become %s: %s; --quantization none or --dtype float32 keeps floats",
        describe(found, dtype),
        why,
    )
    return found


def named_quantization(
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    platform: str,
    dtype: np.dtype,
    kernels: str,
    *,
    fast_only: bool = False,
) -> Quantization | None:
    """The formats that --quantization names, None for plain weights (as auto is, without a file).

    platform: of the mesh's devices, which need not be here. fast_only: refuses what only the
    definition can do. Raises UsageError when it names no scheme, or one that this model or machine
    cannot do.
    """
    if config.quantization in (NONE, AUTO):
        return None
    try:
        scheme = named_scheme(config.quantization)
        return _make(scheme, model, mesh, platform, dtype, kernels, fast_only=fast_only)
    except KernelError as error:
        raise UsageError(f"--quantization: {error}") from None


def describe(quantization: Quantization | None, dtype: np.dtype) -> str:
    """For the log: what weights are stored as."""
    if quantization is None:
        return dtype.name
    layers, embedding = quantization.layers.scheme.name, quantization.embedding.scheme.name
    return layers if layers == embedding else f"{layers}, embedding {embedding}"


def embedding_scheme(scheme: Scheme) -> Scheme:
    """For embedding and output head: 4 bits would show there, so they get 8."""
    if scheme.values != "int4":
        return scheme
    return named_scheme(scheme.name.replace("int4", "int8").replace("_zero", ""))


def _is_in_blocks(reader: CheckpointReader) -> bool:
    """Whether all matrices but embedding and head are stored in BLOCK_FORMATS."""
    matrices = [info for info in reader.tensors.values() if len(info.shape) == 2]
    layers = [info for info in matrices if "embd" not in info.name and "output." not in info.name]
    return bool(layers) and all(info.dtype in BLOCK_FORMATS for info in layers)


def _make(
    scheme: Scheme,
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    platform: str,
    dtype: np.dtype,
    kernels: str,
    *,
    fast_only: bool,
) -> Quantization:
    """Both formats. Raises KernelError with every reason when a product cannot be done."""
    split = tensor_parallel_size(mesh)
    vocab = model.vocab_size // split if model.vocab_size % split == 0 else model.vocab_size
    heads = model.num_heads * model.head_size // split
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size // split
    layers = (
        Product(out_size=qkv, in_size=model.hidden_size),
        Product(out_size=model.hidden_size, in_size=heads),
        Product(out_size=2 * model.ffn_size // split, in_size=model.hidden_size),
        Product(out_size=model.hidden_size, in_size=model.ffn_size // split),
    )
    head = (Product(out_size=vocab, in_size=model.hidden_size),)

    def form(scheme: Scheme, products: tuple[Product, ...]) -> WeightFormat:
        choices = _choose(scheme, products, platform, dtype, kernels)
        slow = [each for each in choices if each.implementation == dispatch.REFERENCE]
        if fast_only and slow:
            raise KernelError(f"no fast product for {scheme.name}: {slow[0]}")
        names = {each.implementation for each in choices}
        name = names.pop() if len(names) == 1 else dispatch.REFERENCE
        return WeightFormat(scheme=scheme, implementation=name, mesh=mesh)

    return Quantization(
        layers=form(scheme, layers),
        embedding=form(embedding_scheme(scheme), head),
    )


def _choose(
    scheme: Scheme, products: tuple[Product, ...], platform: str, dtype: np.dtype, kernels: str
) -> list[dispatch.Choice]:
    """The implementation of each product."""
    found = []
    for product in products:
        scheme.num_groups(product.in_size)
        choice = dispatch.choose(
            "quantized_matmul",
            platform=platform,
            kernels=kernels,
            dtype=jnp.dtype(dtype),
            scheme=scheme,
            out_size=product.out_size,
            in_size=product.in_size,
        )
        found.append(choice)
    return found
