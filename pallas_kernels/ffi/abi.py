"""XLA's FFI structs (`xla/ffi/api/c_api.h`, API 0.3) and how compiled code reads them.

Serves step 6b. The structs are written down once, as ctypes; offsets follow from that, and a test
compares them with the header that jaxlib ships. Addresses are plain integers (`intp`) in compiled
code. Must not know any op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils, errors

Params = ParamSpec("Params")
Result = TypeVar("Result")

API_VERSION = (0, 3)
EXTENSION_METADATA = 1
STAGE_EXECUTE = 3
ARGUMENT_BUFFER = 1
INVALID_ARGUMENT = 3
RESOURCE_EXHAUSTED = 8
#: XLA_FFI_DataType values of the dtypes that kernels here read.
S32, F32, BF16 = 4, 11, 16

_SIZE, _POINTER, _INT, _INT64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_Fields = list[tuple[str, Any]]
_HEAD: _Fields = [("struct_size", _SIZE), ("extension_start", _POINTER)]


class ExtensionBase(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("type", _INT), ("next", _POINTER)]


class ApiVersion(ctypes.Structure):
    _fields_ = [*_HEAD, ("major_version", _INT), ("minor_version", _INT)]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
        ("state_type_id", _INT64),
    ]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("extension_base", ExtensionBase), ("metadata", _POINTER)]


class Buffer(ctypes.Structure):
    _fields_ = [*_HEAD, ("dtype", _INT), ("data", _POINTER), ("rank", _INT64), ("dims", _POINTER)]


class Args(ctypes.Structure):
    _fields_ = [*_HEAD, ("size", _INT64), ("types", _POINTER), ("args", _POINTER)]


class Rets(ctypes.Structure):
    _fields_ = [*_HEAD, ("size", _INT64), ("types", _POINTER), ("rets", _POINTER)]


class Attrs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("size", _INT64),
        ("types", _POINTER),
        ("names", _POINTER),
        ("attrs", _POINTER),
    ]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", _INT), ("value", _POINTER)]


class CallFrame(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("api", _POINTER),
        ("ctx", _POINTER),
        ("stage", _INT),
        ("args", Args),
        ("rets", Rets),
        ("attrs", Attrs),
        ("future", _POINTER),
    ]


class ErrorCreateArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("message", _POINTER), ("errc", _INT)]


class ErrorDestroyArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("error", _POINTER)]


class ThreadPoolScheduleArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("ctx", _POINTER), ("task", _POINTER), ("data", _POINTER)]


class ThreadPoolNumThreadsArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("ctx", _POINTER), ("num_threads", _POINTER)]


class Api(ctypes.Structure):
    """The functions that XLA offers; those after the last one used here are left out."""

    _fields_ = [
        *_HEAD,
        ("api_version", ApiVersion),
        ("internal_api", _POINTER),
        ("XLA_FFI_Error_Create", _POINTER),
        ("XLA_FFI_Error_GetMessage", _POINTER),
        ("XLA_FFI_Error_Destroy", _POINTER),
        ("XLA_FFI_Handler_Register", _POINTER),
        ("XLA_FFI_Stream_Get", _POINTER),
        ("XLA_FFI_Type_Register", _POINTER),
        ("XLA_FFI_ExecutionContext_Get", _POINTER),
        ("XLA_FFI_State_Set", _POINTER),
        ("XLA_FFI_State_Get", _POINTER),
        ("XLA_FFI_DeviceMemory_Allocate", _POINTER),
        ("XLA_FFI_DeviceMemory_Free", _POINTER),
        ("XLA_FFI_ThreadPool_Schedule", _POINTER),
        ("XLA_FFI_ThreadPool_NumThreads", _POINTER),
    ]


def used_size(struct: type[ctypes.Structure]) -> int:
    """XLA_FFI_STRUCT_SIZE: up to the end of the last field, without padding."""
    last = getattr(struct, struct._fields_[-1][0])
    return int(last.offset + last.size)


FRAME_EXTENSION = CallFrame.extension_start.offset
FRAME_API = CallFrame.api.offset
FRAME_CTX = CallFrame.ctx.offset
FRAME_STAGE = CallFrame.stage.offset
FRAME_ARGS = CallFrame.args.offset + Args.args.offset
FRAME_RETS = CallFrame.rets.offset + Rets.rets.offset
FRAME_ATTRS = CallFrame.attrs.offset + Attrs.attrs.offset
SCALAR_VALUE = Scalar.value.offset
BUFFER_DTYPE, BUFFER_DATA = Buffer.dtype.offset, Buffer.data.offset
BUFFER_DIMS = Buffer.dims.offset
API_ERROR_CREATE = Api.XLA_FFI_Error_Create.offset
EXTENSION_TYPE = ExtensionBase.type.offset
EXTENSION_METADATA_AT = MetadataExtension.metadata.offset
METADATA_MAJOR = Metadata.api_version.offset + ApiVersion.major_version.offset
METADATA_MINOR = Metadata.api_version.offset + ApiVersion.minor_version.offset
METADATA_TRAITS, METADATA_STATE = Metadata.traits.offset, Metadata.state_type_id.offset
ERROR_SIZE, ERROR_MESSAGE = used_size(ErrorCreateArgs), ErrorCreateArgs.message.offset
ERROR_CODE = ErrorCreateArgs.errc.offset
MAJOR, MINOR = API_VERSION

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()


# Nothing here is called from Python: wrappers for that would only cost compile time.
_OPTIONS = {
    "boundscheck": False,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Compile for use inside a handler: IEEE arithmetic, no checks, no exceptions."""
    return njit(function, **_OPTIONS)  # type: ignore[no-any-return]


def inlined(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """As `compiled`, and always inlined into the caller."""
    return njit(function, forceinline=True, **_OPTIONS)  # type: ignore[no-any-return]


def merged(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """As `compiled`, but its statements become the caller's.

    Numba optimises all code below a function again with every function above it: for what has one
    caller and much below it, this saves compile time.
    """
    return njit(function, inline="always", **_OPTIONS)  # type: ignore[no-any-return]


def named(function: Callable[Params, Result], name: str) -> Callable[Params, Result]:
    """The function under a name that belongs to its content.

    Numba names machine code by qualified name and a counter of the process: two closures of one
    factory, cached by different processes, could be taken for one another.
    """
    function.__name__ = function.__qualname__ = name
    return function


def primitive(typing: Callable[..., Any]) -> Any:
    """A function written as LLVM instructions (`numba.extending.intrinsic`)."""
    return extending.intrinsic(typing)


def _loader(numba_type: Any, llvm_type: Any) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], llvm_type.as_pointer())
            return builder.load(pointer)

        return numba_type(types.intp), emit

    return primitive(load)


def _storer(numba_type: Any, llvm_type: Any) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), emit

    return primitive(store)


load_i64, load_i32 = _loader(types.int64, I64), _loader(types.int32, I32)
load_u16, load_f32 = _loader(types.uint16, I16), _loader(types.float32, FLOAT)
load_f64 = _loader(types.float64, DOUBLE)
store_i64, store_i32 = _storer(types.int64, I64), _storer(types.int32, I32)
store_i8 = _storer(types.int8, I8)
store_u16, store_f32 = _storer(types.uint16, I16), _storer(types.float32, FLOAT)


def _bitcast(numba_from: Any, numba_to: Any, llvm_to: Any) -> Any:
    def cast(typing_context: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_to)

        return numba_to(numba_from), emit

    return primitive(cast)


def _either(comparison: str) -> Any:
    def choose(typing_context: Any, x: Any, y: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_wins = builder.icmp_signed(comparison, args[0], args[1])
            return builder.select(x_wins, args[0], args[1])

        return types.int64(types.int64, types.int64), emit

    return primitive(choose)


#: The smaller and the larger of two 64-bit integers.
smaller, larger = _either("<"), _either(">")
float_of_bits = _bitcast(types.uint32, types.float32, FLOAT)
bits_of_float = _bitcast(types.float32, types.uint32, I32)

malloc = types.ExternalFunction("malloc", types.intp(types.intp))
free = types.ExternalFunction("free", types.void(types.intp))


@primitive
def call_pointer(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address, `intp f(intp)`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [args[1]])

    return types.intp(types.intp, types.intp), emit


@primitive
def stack_slots(typing_context: Any, count: Any) -> Any:
    """Address of `count` (a literal) 8-byte slots, set to zero, in this function's frame."""
    if not isinstance(count, types.IntegerLiteral):
        raise errors.RequireLiteralValue("stack_slots needs a literal number")
    number = count.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = ir.ArrayType(I64, number)
        slots = cgutils.alloca_once(builder, array)
        builder.store(ir.Constant(array, None), slots)
        return builder.ptrtoint(slots, I64)

    return types.intp(count), emit


@primitive
def text(typing_context: Any, value: Any) -> Any:
    """Address of a literal string that ends in NUL."""
    if not isinstance(value, types.StringLiteral):
        raise errors.RequireLiteralValue("text needs a literal string")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constant = context.insert_const_string(builder.module, value.literal_value)
        return builder.ptrtoint(constant, I64)

    return types.intp(value), emit


def _read(steps: Callable[..., Any]) -> Any:
    """A primitive of (address, index); a plain function would be compiled once per index."""

    def reader(typing_context: Any, address: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def load(place: Any, distance: Any) -> Any:
                if isinstance(distance, int):
                    distance = ir.Constant(I64, distance)
                place = builder.add(place, distance)
                return builder.load(builder.inttoptr(place, I64.as_pointer()))

            return steps(load, args[0], builder.mul(args[1], ir.Constant(I64, 8)))

        return types.int64(types.intp, types.intp), emit

    return primitive(reader)


#: argument(frame, i), result(frame, i): address of the i-th operand's, result's buffer struct.
argument = _read(lambda load, frame, at: load(load(frame, FRAME_ARGS), at))
result = _read(lambda load, frame, at: load(load(frame, FRAME_RETS), at))
#: attribute(frame, i): address of a scalar attribute's value; attributes are sorted by name.
attribute = _read(lambda load, frame, at: load(load(load(frame, FRAME_ATTRS), at), SCALAR_VALUE))
#: size_of(buffer, axis): elements along an axis.
size_of = _read(lambda load, buffer, at: load(load(buffer, BUFFER_DIMS), at))


@primitive
def data_of(typing_context: Any, buffer: Any) -> Any:
    """Address of a buffer's first element."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.add(args[0], ir.Constant(I64, BUFFER_DATA))
        return builder.load(builder.inttoptr(place, I64.as_pointer()))

    return types.int64(types.intp), emit


@primitive
def dtype_of(typing_context: Any, buffer: Any) -> Any:
    """XLA_FFI_DataType of a buffer."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.add(args[0], ir.Constant(I64, BUFFER_DTYPE))
        return builder.load(builder.inttoptr(place, I32.as_pointer()))

    return types.int32(types.intp), emit


@compiled
def make_error(frame: int, code: int, message: int) -> int:
    """Address of a new XLA_FFI_Error to be returned by the handler; XLA copies the message."""
    slots = stack_slots(4)
    store_i64(slots, ERROR_SIZE)
    store_i64(slots + ERROR_MESSAGE, message)
    store_i32(slots + ERROR_CODE, types.int32(code))
    return call_pointer(load_i64(load_i64(frame + FRAME_API) + API_ERROR_CREATE), slots)  # type: ignore[no-any-return]


@compiled
def must_run(frame: int) -> bool:
    """Whether the handler's work is asked for; answers XLA's question for the version."""
    extension = load_i64(frame + FRAME_EXTENSION)
    if extension != 0 and load_i32(extension + EXTENSION_TYPE) == EXTENSION_METADATA:
        metadata = load_i64(extension + EXTENSION_METADATA_AT)
        store_i32(metadata + METADATA_MAJOR, types.int32(MAJOR))
        store_i32(metadata + METADATA_MINOR, types.int32(MINOR))
        store_i32(metadata + METADATA_TRAITS, types.int32(0))
        store_i64(metadata + METADATA_STATE, 0)
        return False
    return load_i32(frame + FRAME_STAGE) == STAGE_EXECUTE  # type: ignore[no-any-return]
