"""The XLA handlers of quantised products on CPUs, one per kernel (step 6).

Plain functions of a module, because Numba finds machine code on disk by a function's name and what
it encloses: what a closure encloses differs from process to process. Nothing is compiled here;
`ffi.targets` compiles the handler that is asked for. Must not know schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pallas_kernels.quantized_matmul.cpu_dots import Instructions, best_instructions
from pallas_kernels.quantized_matmul.cpu_kernel import make_body
from pallas_kernels.quantized_matmul.cpu_tiles import Format

BEST = best_instructions()
#: Instructions that a machine with better ones has, too: to compare with, and for the tests.
LESSER: Instructions = "avx2" if BEST == "avx512" else "portable"

_int8_integers, _int8_integers_lesser, _int8_integers_plain = (
    make_body("int8", True, i) for i in (BEST, LESSER, "portable")
)
_int4_integers, _int4_integers_lesser, _int4_integers_plain = (
    make_body("int4", True, i) for i in (BEST, LESSER, "portable")
)
_int8_floats, _int8_floats_lesser, _int8_floats_plain = (
    make_body("int8", False, i) for i in (BEST, LESSER, "portable")
)
_int4_floats, _int4_floats_lesser, _int4_floats_plain = (
    make_body("int4", False, i) for i in (BEST, LESSER, "portable")
)
_fp8_floats, _fp8_floats_lesser, _fp8_floats_plain = (
    make_body("fp8", False, i) for i in (BEST, LESSER, "portable")
)


def int8_integers(frame: int) -> int:
    return _int8_integers(frame)


def int8_integers_lesser(frame: int) -> int:
    return _int8_integers_lesser(frame)


def int8_integers_plain(frame: int) -> int:
    return _int8_integers_plain(frame)


def int4_integers(frame: int) -> int:
    return _int4_integers(frame)


def int4_integers_lesser(frame: int) -> int:
    return _int4_integers_lesser(frame)


def int4_integers_plain(frame: int) -> int:
    return _int4_integers_plain(frame)


def int8_floats(frame: int) -> int:
    return _int8_floats(frame)


def int8_floats_lesser(frame: int) -> int:
    return _int8_floats_lesser(frame)


def int8_floats_plain(frame: int) -> int:
    return _int8_floats_plain(frame)


def int4_floats(frame: int) -> int:
    return _int4_floats(frame)


def int4_floats_lesser(frame: int) -> int:
    return _int4_floats_lesser(frame)


def int4_floats_plain(frame: int) -> int:
    return _int4_floats_plain(frame)


def fp8_floats(frame: int) -> int:
    return _fp8_floats(frame)


def fp8_floats_lesser(frame: int) -> int:
    return _fp8_floats_lesser(frame)


def fp8_floats_plain(frame: int) -> int:
    return _fp8_floats_plain(frame)


#: By format of weights, whether x is rounded to integers, and instructions.
HANDLERS: Mapping[tuple[Format, bool, Instructions], Callable[[int], int]] = {
    ("int8", True, "portable"): int8_integers_plain,
    ("int4", True, "portable"): int4_integers_plain,
    ("int8", False, "portable"): int8_floats_plain,
    ("int4", False, "portable"): int4_floats_plain,
    ("fp8", False, "portable"): fp8_floats_plain,
    ("int8", True, LESSER): int8_integers_lesser,
    ("int4", True, LESSER): int4_integers_lesser,
    ("int8", False, LESSER): int8_floats_lesser,
    ("int4", False, LESSER): int4_floats_lesser,
    ("fp8", False, LESSER): fp8_floats_lesser,
    ("int8", True, BEST): int8_integers,
    ("int4", True, BEST): int4_integers,
    ("int8", False, BEST): int8_floats,
    ("int4", False, BEST): int4_floats,
    ("fp8", False, BEST): fp8_floats,
}
