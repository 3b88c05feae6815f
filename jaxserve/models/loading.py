"""From an open checkpoint to a decoder whose parameters lie where they are used (before step 1).

The abstract decoder says which parameters there are, with shape, dtype and logical axes. Each is
then read alone, shard by shard and in blocks of rows, straight into its final dtype: host memory
holds the finished shards and little more. Random weights take the same road without a file.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints.reader import CheckpointReader
from checkpoints.validate import check_tensors
from jaxserve.config import ModelConfig
from jaxserve.layers.linear import INIT_SCALE
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.family import Family
from jaxserve.models.quantized_loading import QuantizedLoader
from jaxserve.models.registry import check_config, find_family, read_model_config
from jaxserve.models.shards import random_shard, read_shard
from jaxserve.models.sources import Source
from jaxserve.models.weight_store import WeightStore
from jaxserve.parallel.mesh import check_divisible, sharding
from jaxserve.quantization.weights import Quantization

logger = logging.getLogger("jaxserve.models")

#: Random weights repeat after so many (a prime, so that no two rows of a matrix are equal).
RANDOM_TABLE_SIZE = 4_000_037

#: Tensors of a checkpoint that hold nothing the configuration does not say already.
IGNORED_ENDINGS = ("rotary_emb.inv_freq", "rope_freqs.weight")

MakeArray = Callable[[str, nnx.Param[jax.Array], jax.NamedSharding], jax.Array]


@runtime_checkable
class RestoringReader(Protocol):
    """A reader that can put whole tensors on the mesh by itself, as Orbax can."""

    def restore(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Arrays by the checkpoint's names, in the dtypes and shardings that are asked for."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """One parameter of the abstract decoder."""

    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str | None, ...]


def make_abstract_model(
    config: ModelConfig, dtype: DTypeLike, quantization: Quantization | None = None
) -> Decoder:
    """A decoder whose parameters are shapes only; takes no memory."""
    return Decoder(config, dtype=dtype, rngs=None, quantization=quantization)


def parameter_infos(
    config: ModelConfig, dtype: DTypeLike, quantization: Quantization | None = None
) -> dict[str, ParameterInfo]:
    """All parameters by path ("layers.3.attention.inputs.q.weight"), quantised ones by array."""
    _, state = nnx.split(make_abstract_model(config, dtype, quantization))
    return {
        _join(path): ParameterInfo(
            shape=tuple(param.get_value().shape),
            dtype=np.dtype(param.get_value().dtype),
            logical_axes=param.get_metadata()["logical_axes"],
        )
        for path, param in nnx.to_flat_state(state)
    }


def _join(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)


def _fill(
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    quantization: Quantization | None,
    make: MakeArray,
    make_quantized: MakeArray,
) -> Decoder:
    """The decoder with every parameter made by `make(path, abstract parameter, sharding)`.

    make_quantized: makes the arrays of quantised weights.
    """
    check_config(config)
    check_divisible(config, mesh)
    graph, state = nnx.split(make_abstract_model(config, dtype, quantization))
    filled = []
    for path, param in nnx.to_flat_state(state):
        metadata, shape = param.get_metadata(), param.get_value().shape
        load = make_quantized if "recipe" in metadata else make
        array = load(_join(path), param, sharding(mesh, metadata["logical_axes"], shape))
        filled.append((path, param.replace(array)))
    decoder: Decoder = nnx.merge(graph, nnx.from_flat_state(filled))
    return decoder


def load_model(
    reader: CheckpointReader,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    store: WeightStore | None = None,
) -> tuple[ModelConfig, Decoder]:
    """The model of an open checkpoint, on the mesh, with weights and activations in `dtype`.

    quantization: how matrices are stored instead; None leaves them floats. store: where the arrays
    of an earlier start may lie, and where they are kept for the next.

    Raises UnsupportedModelError for an unknown architecture, CheckpointFormatError for tensors
    that are missing, too many or wrongly shaped (all at once), UsageError where the model cannot
    be split over the mesh.
    """
    config = read_model_config(reader)
    if store is not None:
        stored = store.get()
        if stored is not None:
            logger.info("quantised weights are those of an earlier start")
            return config, _place_stored(config, mesh, dtype, quantization, stored)
    family = find_family(reader)
    infos = parameter_infos(config, dtype)
    sources = {path: find_source(config, family, path, info) for path, info in infos.items()}
    check_sources(reader, config, sources)
    check_divisible(config, mesh)
    _, state = nnx.split(make_abstract_model(config, dtype, quantization))
    plain = {_join(path) for path, _ in nnx.to_flat_state(state)}
    kept = {path: info for path, info in infos.items() if path in plain}
    ready = restore_plain(reader, kept, {path: sources[path] for path in kept}, mesh)

    def make(path: str, param: nnx.Param[jax.Array], place: jax.NamedSharding) -> jax.Array:
        del param
        if path in ready:
            return ready.pop(path)
        return load_parameter(reader, sources[path], infos[path], place)

    def read(path: str, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return read_shard(reader, sources[path], bounds, np.dtype(np.float32))

    decoder = _fill(config, mesh, dtype, quantization, make, QuantizedLoader(read).load)
    if store is not None:
        _, state = nnx.split(decoder)
        store.put({_join(path): param.get_value() for path, param in nnx.to_flat_state(state)})
    return config, decoder


def _place_stored(
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    quantization: Quantization | None,
    stored: dict[str, np.ndarray],
) -> Decoder:
    """The decoder of arrays that lie in memory already; a CPU uses them where they lie."""

    def make(path: str, param: nnx.Param[jax.Array], place: jax.NamedSharding) -> jax.Array:
        array, value = stored[path], param.get_value()
        assert (array.shape, array.dtype) == (value.shape, value.dtype), path
        placed: jax.Array = jax.device_put(array, place, may_alias=True)
        return placed

    return _fill(config, mesh, dtype, quantization, make, make)


def find_source(config: ModelConfig, family: Family, path: str, info: ParameterInfo) -> Source:
    """Where a parameter's values stand in this family's files."""
    return family.adapt(config, path, Source(name=family.names.name(path), shape=info.shape))


def check_sources(
    reader: CheckpointReader, config: ModelConfig, sources: dict[str, Source]
) -> None:
    """Raises CheckpointFormatError that lists all tensors which contradict the configuration."""
    expected = {source.name: source.shape for source in sources.values()}

    def ignore(name: str) -> bool:
        # Some tied checkpoints store the shared matrix twice.
        tied_head = config.tie_embeddings and name == "lm_head.weight"
        return tied_head or name.endswith(IGNORED_ENDINGS)

    check_tensors(expected, reader, ignore=ignore)


def restore_plain(
    reader: CheckpointReader,
    infos: dict[str, ParameterInfo],
    sources: dict[str, Source],
    mesh: Mesh,
) -> dict[str, jax.Array]:
    """By path, what the reader can put on the mesh by itself (Orbax): tensors stored as they are."""
    if not isinstance(reader, RestoringReader):
        return {}
    plain = {
        path: source
        for path, source in sources.items()
        if source == Source(name=source.name, shape=infos[path].shape)
    }
    wanted = {
        source.name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            infos[path].shape,
            infos[path].dtype,
            sharding=sharding(mesh, infos[path].logical_axes, infos[path].shape),
        )
        for path, source in plain.items()
    }
    arrays = reader.restore(wanted)
    return {path: arrays[source.name] for path, source in plain.items()}


def load_parameter(
    reader: CheckpointReader, source: Source, info: ParameterInfo, place: jax.NamedSharding
) -> jax.Array:
    """One parameter, read shard by shard; devices that hold the same shard share one reading."""

    @functools.cache
    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return read_shard(reader, source, bounds, info.dtype)

    def callback(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = index or ()
        return read(
            tuple(part.indices(size)[:2] for part, size in zip(slices, info.shape, strict=True))
        )

    return jax.make_array_from_callback(info.shape, place, callback)


def make_random_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    seed: int,
    quantization: Quantization | None = None,
) -> Decoder:
    """A decoder of this shape with random weights, the same on every mesh.

    For measurements without a checkpoint. Values come from one table of normal numbers, read from
    a different place for each parameter: nothing is compiled and large models cost only copying.
    """
    generator = np.random.default_rng(seed)
    table = generator.normal(0.0, INIT_SCALE, RANDOM_TABLE_SIZE).astype(np.float32)

    def make(path: str, param: nnx.Param[jax.Array], place: jax.NamedSharding) -> jax.Array:
        del path
        value = param.get_value()
        init, offset = param.get_metadata()["init"], int(generator.integers(RANDOM_TABLE_SIZE))
        if init != "normal":
            full = np.full(value.shape, init == "ones", value.dtype)
            return jax.make_array_from_callback(value.shape, place, full.__getitem__)
        rows, columns = value.shape

        def callback(index: tuple[slice, ...] | None) -> np.ndarray:
            first, second = index or (slice(None), slice(None))
            return random_shard(
                table, offset, columns, range(rows)[first], range(columns)[second], value.dtype
            )

        return jax.make_array_from_callback(value.shape, place, callback)

    def read(path: str, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        if len(bounds) == 1:
            return np.zeros(bounds[0][1] - bounds[0][0], np.float32)
        offset = zlib.crc32(path.encode()) % RANDOM_TABLE_SIZE
        rows, columns = (range(*bound) for bound in bounds)
        # A width of its own for each weight: rows differ, whatever part of them a device holds.
        return random_shard(table, offset, 8191, rows, columns, np.dtype(np.float32))

    return _fill(config, mesh, dtype, quantization, make, QuantizedLoader(read).load)
