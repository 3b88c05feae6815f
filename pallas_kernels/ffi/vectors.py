"""Explicit vector code for compiled handlers, written as LLVM instructions.

Serves step 6b. `LANES` floats make a vector; LLVM splits or widens it for the machine at hand
(x86-64 with SSE, AVX2 or AVX-512, arm64 with NEON), so there is one source for all. Sums have a
fixed order: products are added by `llvm.fmuladd`, the only step whose rounding depends on the kind
of machine, and never on where in a loop an element stands. Must not know any op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.ffi.abi import FLOAT, I8, I32, I64, primitive

#: Floats in a vector: the width of AVX-512 where it exists, else of AVX2 (two NEON registers).
LANES: int = 16 if llvm.get_host_cpu_features().get("avx512f") else 8

#: 2**f = 1 + f * (c0 + c1 * f + ...) for f in [-0.5, 0.5]; relative error 2e-9 before rounding.
EXP2_COEFFICIENTS = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398873852565885,
    0.00015353361959569156,
)
#: Adding 1.5 * 2**23 rounds to an integer that stands in the low bits; 127 is the exponent's bias.
_ROUND = 12582912.0
_SMALLEST_EXPONENT = -126.0


class Emitter:
    """Emits operations on float vectors of one width; width 1 means plain floats."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.floats = FLOAT if lanes == 1 else ir.VectorType(FLOAT, lanes)
        self.ints = I32 if lanes == 1 else ir.VectorType(I32, lanes)
        suffix = "f32" if lanes == 1 else f"v{lanes}f32"
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        name = f"llvm.fmuladd.{suffix}"
        self._muladd = cgutils.get_or_insert_function(builder.module, kind, name)

    def load(self, address: Any) -> Any:
        """Floats at an address, which need not be aligned."""
        return self._load(address, self.floats)

    def load_ints(self, address: Any) -> Any:
        return self._load(address, self.ints)

    def _load(self, address: Any, kind: Any) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = 4
        return value

    def store(self, value: Any, address: Any) -> None:
        kind = self.floats.as_pointer()
        self.builder.store(value, self.builder.inttoptr(address, kind)).align = 4

    def constant(self, value: float) -> Any:
        return ir.Constant(self.floats, value if self.lanes == 1 else [value] * self.lanes)

    def int_constant(self, value: int) -> Any:
        return ir.Constant(self.ints, value if self.lanes == 1 else [value] * self.lanes)

    def splat(self, scalar: Any) -> Any:
        """A vector of the same scalar (float or int32) in all lanes."""
        if self.lanes == 1:
            return scalar
        kind = ir.VectorType(scalar.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def splat_from(self, address: Any) -> Any:
        """The float at an address in all lanes."""
        return self.splat(Emitter(self.builder, 1).load(address))

    def muladd(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z."""
        return self.builder.call(self._muladd, [x, y, z])

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger; NaN when y is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def sum_each(self, rows: list[Any]) -> Any:
        """A vector whose lane i is the sum of the lanes of rows[i]; `lanes` rows, a power of two.

        Every sum is a tree: lanes i and i + lanes / 2 are added, then their sums i and
        i + lanes / 4, and so on, as `sum_tree` does with as many vectors.
        """
        assert len(rows) == self.lanes, (len(rows), self.lanes)
        step = self.lanes // 2
        while len(rows) > 1:
            lanes, half = range(self.lanes), len(rows) // 2
            low = [j if j & step == 0 else self.lanes + j - step for j in lanes]
            high = [lane + step for lane in low]
            rows = [
                self.builder.fadd(self._shuffle(x, y, low), self._shuffle(x, y, high))
                for x, y in zip(rows[:half], rows[half:], strict=True)
            ]
            step //= 2
        return rows[0]

    def sum_tree(self, rows: list[Any]) -> Any:
        """The sum of a power of two of vectors, in the order in which `sum_each` adds lanes."""
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [self.builder.fadd(x, y) for x, y in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]

    def sum_lanes(self, vector: Any) -> Any:
        """The sum of a vector's lanes in all lanes, in the order of `sum_each`."""
        return self._over_lanes(vector, self.builder.fadd)

    def max_lanes(self, vector: Any) -> Any:
        """The largest of a vector's lanes in all lanes."""
        return self._over_lanes(vector, self.maximum)

    def _over_lanes(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        step = self.lanes // 2
        while step:
            other = self._shuffle(vector, vector, [j ^ step for j in range(self.lanes)])
            vector = join(vector, other)
            step //= 2
        return vector

    def _shuffle(self, x: Any, y: Any, mask: list[int]) -> Any:
        kind = ir.VectorType(I32, self.lanes)
        return self.builder.shuffle_vector(x, y, ir.Constant(kind, mask))

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 127; 0 below -126, NaN for NaN. Relative error about 1e-7."""
        b = self.builder
        biased = b.fadd(x, self.constant(_ROUND + 127.0))
        fraction = b.fsub(x, b.fsub(biased, self.constant(_ROUND + 127.0)))
        total = self.constant(EXP2_COEFFICIENTS[-1])
        for coefficient in (*reversed(EXP2_COEFFICIENTS[:-1]), 1.0):
            total = self.muladd(total, fraction, self.constant(coefficient))
        power = b.shl(b.bitcast(biased, self.ints), self.int_constant(23))
        scaled = b.fmul(total, b.bitcast(power, self.floats))
        tiny = b.fcmp_ordered("<", x, self.constant(_SMALLEST_EXPONENT))
        return b.select(tiny, self.constant(0.0), scaled)


def variable(e: Emitter, start: Any = None) -> Any:
    """A vector variable (a pointer), zero or `start`; the optimiser keeps it in a register."""
    place = cgutils.alloca_once(e.builder, e.floats)
    e.builder.store(e.constant(0.0) if start is None else start, place)
    return place


@contextmanager
def loop(builder: Any, count: Any) -> Iterator[Any]:
    """A counted loop; yields the index (64-bit)."""
    with cgutils.for_range(builder, count, intp=I64) as state:
        yield state.index


def int64(value: int) -> Any:
    return ir.Constant(I64, value)


def offset(builder: Any, address: Any, index: Any, stride: Any) -> Any:
    """address + index * stride; index and stride may be Python integers."""
    index = int64(index) if isinstance(index, int) else index
    stride = int64(stride) if isinstance(stride, int) else stride
    return builder.add(address, builder.mul(index, stride))


def as_it_is(builder: Any, address: Any) -> Any:
    """The same address, of which the optimiser knows nothing.

    Places at constant distances from it are then read from it, where the optimiser may else keep a
    running address of each, more than there are registers.
    """
    kind = ir.FunctionType(I64, [I64])
    return builder.asm(kind, "", "=r,0", [address], side_effect=False)


def procedure(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a primitive without result out of `emit(builder, *values)`.

    arguments: Numba types of its parameters. The emitter's name must be its own (see
    `pool.make_parallel_for`); being inlined, it leaves no symbol behind.
    """

    def decorate(emit: Callable[..., None]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(builder, *args)
            return context.get_dummy_value()

        def typing(context: Any, *_: Any) -> Any:
            return types.void(*arguments), generate

        # Numba matches calls with the typing function's parameters, one per argument.
        names = ("context", *(f"argument{i}" for i in range(len(arguments))))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        vars(typing)["__signature__"] = inspect.Signature(parameters)
        typing.__name__ = typing.__qualname__ = emit.__name__
        return primitive(typing)

    return decorate


@primitive
def exp2(typing_context: Any, x: Any) -> Any:
    """`Emitter.exp2` of one float."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emitter(builder, 1).exp2(args[0])

    return types.float32(types.float32), emit


def emit_prefetch(builder: Any, address: Any) -> None:
    """Asks for the cache line at an address; nothing happens when it is not mapped."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep_in_l2, data = (ir.Constant(I32, i) for i in (0, 2, 1))
    builder.call(function, [pointer, read, keep_in_l2, data])
