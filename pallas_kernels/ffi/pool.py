"""Work split over XLA's own intra-op thread pool, with the calling thread taking part.

Serves step 6b. Items are handed out one by one, so threads that lose their core do not hold up
the others more than one item. Two calls may meet (several virtual devices, several programs): the
caller finishes all items itself where no other thread is free, so nothing can wait for ever.
Must not know any op.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.ffi import abi
from pallas_kernels.ffi.abi import compiled, load_i64, merged, named, primitive, smaller, store_i64

API_SCHEDULE = abi.Api.XLA_FFI_ThreadPool_Schedule.offset
API_NUM_THREADS = abi.Api.XLA_FFI_ThreadPool_NumThreads.offset
API_ERROR_DESTROY = abi.Api.XLA_FFI_Error_Destroy.offset
FRAME_API, FRAME_CTX = abi.FRAME_API, abi.FRAME_CTX
SCHEDULE_SIZE = abi.used_size(abi.ThreadPoolScheduleArgs)
SCHEDULE_CTX = abi.ThreadPoolScheduleArgs.ctx.offset
SCHEDULE_TASK = abi.ThreadPoolScheduleArgs.task.offset
SCHEDULE_DATA = abi.ThreadPoolScheduleArgs.data.offset
THREADS_SIZE = abi.used_size(abi.ThreadPoolNumThreadsArgs)
THREADS_CTX = abi.ThreadPoolNumThreadsArgs.ctx.offset
THREADS_OUT = abi.ThreadPoolNumThreadsArgs.num_threads.offset
DESTROY_SIZE = abi.used_size(abi.ErrorDestroyArgs)
DESTROY_ERROR = abi.ErrorDestroyArgs.error.offset

# State of one call, on the heap: a helper that starts late only touches this block. Counters
# that several threads change stand on cache lines of their own.
NEXT, DONE, REFERENCES, COUNT, CONTEXT, STATE_BYTES = 0, 64, 128, 192, 200, 208
STATE_SLOTS = STATE_BYTES // 8
SPINS_BEFORE_YIELD = 4000
IS_X86 = platform.machine() in ("x86_64", "AMD64")

malloc, free = abi.malloc, abi.free
stack_slots, call_pointer = abi.stack_slots, abi.call_pointer
sched_yield = types.ExternalFunction("sched_yield", types.int32())


@primitive
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Adds to the 64-bit integer at an address; returns what was there before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], abi.I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), emit


@primitive
def atomic_load(typing_context: Any, address: Any) -> Any:
    """Reads a 64-bit integer that other threads change; what they wrote before is visible."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], abi.I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), emit


@primitive
def pause(typing_context: Any) -> Any:
    """Tells the core that this is a waiting loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), emit


@primitive
def task_address(typing_context: Any, function: Any) -> Any:
    """Address of a C function `void f(intp)` that calls a compiled function of one intp.

    It is emitted into the caller's own module, so that machine code from the cache holds no
    address of the process which wrote it.
    """
    signature = types.intp(function)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dispatcher = signature.args[0].dispatcher
        dispatcher.compile((types.intp,))
        compilation = dispatcher.overloads[(types.intp,)]
        context.active_code_library.add_linking_library(compilation.library)
        name = compilation.fndesc.mangled_name + ".task"
        entry = builder.module.globals.get(name)
        if entry is None:
            kind = ir.FunctionType(ir.VoidType(), [abi.I64])
            entry = ir.Function(builder.module, kind, name)
            entry.linkage = "internal"
            inner = ir.IRBuilder(entry.append_basic_block("entry"))
            context.call_internal_no_propagate(
                inner, compilation.fndesc, compilation.signature, [entry.args[0]]
            )
            inner.ret_void()
        return builder.ptrtoint(entry, abi.I64)

    return signature, emit


@compiled
def num_threads(frame: int) -> int:
    """Threads of XLA's pool for this call; 1 where it has none."""
    slots = stack_slots(5)
    store_i64(slots, THREADS_SIZE)
    store_i64(slots + THREADS_CTX, load_i64(frame + FRAME_CTX))
    store_i64(slots + THREADS_OUT, slots + 32)
    error = call_pointer(load_i64(load_i64(frame + FRAME_API) + API_NUM_THREADS), slots)
    if error != 0:
        destroy_error(frame, error)
        return 1
    return load_i64(slots + 32)  # type: ignore[no-any-return]


@compiled
def destroy_error(frame: int, error: int) -> None:
    """Gives back an XLA_FFI_Error that is not passed on."""
    slots = stack_slots(3)
    store_i64(slots, DESTROY_SIZE)
    store_i64(slots + DESTROY_ERROR, error)
    call_pointer(load_i64(load_i64(frame + FRAME_API) + API_ERROR_DESTROY), slots)


@compiled
def start_state(state: int, context: int, count: int, helpers: int) -> None:
    store_i64(state + NEXT, 0)
    store_i64(state + DONE, 0)
    store_i64(state + COUNT, count)
    store_i64(state + CONTEXT, context)
    store_i64(state + REFERENCES, 2 + helpers)  # the caller, its own task, the helpers


def make_parallel_for(item: Callable[[int, int], None], name: str) -> Any:
    """Compiled `run(frame, context, count)`: `item(context, i)` for each i below count.

    Returns when all are done; frame 0: the calling thread does them all. `item` is compiled into
    one function only, so it may be `abi.merged`. `name` must belong to this item only (see
    `abi.named`).
    """

    def task(state: int) -> None:
        count = load_i64(state + COUNT)
        context = load_i64(state + CONTEXT)
        index = atomic_add(state + NEXT, 1)
        while index < count:
            item(context, index)
            atomic_add(state + DONE, 1)
            index = atomic_add(state + NEXT, 1)
        if atomic_add(state + REFERENCES, -1) == 1:
            free(state)

    compiled_task = compiled(named(task, f"task_{name}"))

    def run(frame: int, context: int, count: int) -> None:
        helpers, state = 0, 0
        if frame != 0:
            helpers = smaller(count, num_threads(frame)) - 1
        if helpers > 0:
            state = malloc(STATE_BYTES)
        if state == 0:
            alone = stack_slots(STATE_SLOTS)
            start_state(alone, context, count, 0)
            compiled_task(alone)
            return
        start_state(state, context, count, helpers)
        slots = stack_slots(5)
        store_i64(slots, SCHEDULE_SIZE)
        store_i64(slots + SCHEDULE_CTX, load_i64(frame + FRAME_CTX))
        store_i64(slots + SCHEDULE_TASK, task_address(compiled_task))
        store_i64(slots + SCHEDULE_DATA, state)
        schedule = load_i64(load_i64(frame + FRAME_API) + API_SCHEDULE)
        for _ in range(helpers):
            error = call_pointer(schedule, slots)
            if error != 0:  # no helper: the caller does its share
                atomic_add(state + REFERENCES, -1)
                destroy_error(frame, error)
        compiled_task(state)
        spins = 0
        while atomic_load(state + DONE) < count:
            spins += 1
            if spins < SPINS_BEFORE_YIELD:
                pause()
            else:  # a helper lost its core in the middle of an item
                sched_yield()
        if atomic_add(state + REFERENCES, -1) == 1:
            free(state)

    return merged(named(run, f"run_{name}"))
