"""Quantised parameters from a checkpoint's floats, device by device (before step 1).

A quantised weight is two or three arrays that are made together: each device's part of the float
weight is read, quantised and packed for the implementation, and kept until all its arrays are
placed. Matrices that share one weight (`layers.quantized.QuantizedLinears`) lie there device by
device: first the first device's rows of every one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.layers.quantized import Recipe
from pallas_kernels.quantized_matmul import api
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight

#: Reads rows and columns (start, end) of a float parameter by path: float32.
ReadFloats = Callable[[str, tuple[tuple[int, int], ...]], np.ndarray]


class QuantizedLoader:
    """Makes the parameters of quantised layers, each weight once."""

    def __init__(self, read: ReadFloats) -> None:
        self._read = read
        self._module = ""
        self._part: Callable[[int, int], QuantizedWeight]

    def load(self, path: str, param: nnx.Param[jax.Array], place: jax.NamedSharding) -> jax.Array:
        """The array at `path` ("layers.3.attention.o.values", for example), on the mesh.

        Arrays of one weight are best asked for one after the other, or it is made again.
        """
        module, _, leaf = path.rpartition(".")
        shape, recipe = param.get_value().shape, param.get_metadata()["recipe"]
        shard = place.shard_shape(shape)
        grid = tuple(size // part for size, part in zip(shape, shard, strict=True))
        if leaf == "bias":
            return self._load_bias(module, recipe, place, grid[0])
        if self._module != module:
            self._module = module
            self._part = functools.cache(functools.partial(self._make, module, recipe, grid))

        def callback(index: tuple[slice, ...] | None) -> np.ndarray:
            starts = [part.indices(size)[0] for part, size in zip(index or (), shape, strict=True)]
            row, column = (start // part for start, part in zip(starts, shard, strict=True))
            return np.asarray(getattr(self._part(row, column), leaf))

        return jax.make_array_from_callback(shape, place, callback)

    def _make(
        self, module: str, recipe: Recipe, grid: tuple[int, ...], row: int, column: int
    ) -> QuantizedWeight:
        """The part of a weight that the device at (row, column) of the grid holds."""
        width = recipe.in_size // grid[1]
        columns = column * width, (column + 1) * width
        floats = [
            self._read(f"{source}.weight", (rows, columns))
            for source, rows in _device_rows(module, recipe, grid[0], row)
        ]
        scheme = recipe.form.scheme
        weight = api.quantize(jnp.asarray(np.concatenate(floats)), scheme)
        return api.pack(weight, scheme, implementation=recipe.form.implementation)

    def _load_bias(
        self, module: str, recipe: Recipe, place: jax.NamedSharding, devices: int
    ) -> jax.Array:
        size = recipe.out_size // devices

        def callback(index: tuple[slice, ...] | None) -> np.ndarray:
            (rows,) = index or (slice(None),)
            row = (rows.start or 0) // size
            return np.concatenate(
                [
                    self._read(f"{source}.bias", (bounds,))
                    for source, bounds in _device_rows(module, recipe, devices, row)
                ]
            )

        return jax.make_array_from_callback((recipe.out_size,), place, callback)


def _device_rows(
    module: str, recipe: Recipe, devices: int, row: int
) -> list[tuple[str, tuple[int, int]]]:
    """The float modules, and their rows (start, end), that stand in one device's part."""
    parent = module.removesuffix(".fused")
    sources = [(f"{parent}.{name}", size) for name, size in recipe.parts]
    found = []
    for source, size in sources or [(module, recipe.out_size)]:
        share = size // devices
        found.append((source, (row * share, (row + 1) * share)))
    return found
