"""The XLA handlers of paged attention on CPUs, one per format of pages (step 6b).

Plain functions of a module, because Numba finds machine code on disk by a function's name and what
it encloses: what a closure encloses differs from process to process. Nothing is compiled here;
`ffi.targets` compiles the handler that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pallas_kernels.paged_attention.cpu_kernel import make_body
from pallas_kernels.paged_attention.cpu_pages import FORMATS

_float32, _bfloat16 = make_body(FORMATS["float32"]), make_body(FORMATS["bfloat16"])
_int8, _float8 = make_body(FORMATS["int8"]), make_body(FORMATS["float8_e4m3fn"])


def attend_float32_pages(frame: int) -> int:
    return _float32(frame)


def attend_bfloat16_pages(frame: int) -> int:
    return _bfloat16(frame)


def attend_int8_pages(frame: int) -> int:
    return _int8(frame)


def attend_float8_pages(frame: int) -> int:
    return _float8(frame)


#: By dtype of pages.
HANDLERS: Mapping[str, Callable[[int], int]] = {
    "float32": attend_float32_pages,
    "bfloat16": attend_bfloat16_pages,
    "int8": attend_int8_pages,
    "float8_e4m3fn": attend_float8_pages,
}
