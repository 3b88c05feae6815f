"""XLA custom calls written in Python: the typed FFI's C interface, spoken by Numba code.

Used by the CPU implementations of step 6b. No C compiler is involved: `abi` knows XLA's structs,
`pool` runs work on XLA's own threads, `vectors` emits explicit vector code, and `targets` compiles
a handler once, keeps its machine code in a folder and tells XLA about it. Knows no op.
"""
