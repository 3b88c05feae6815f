"""Products with quantised weights on this machine's CPU: the kernels, the definition, XLA's best.

    python benchmarks/quantized_matmul.py [--rounds 5] [--filter smollm2-gate-up,smollm2-head]
        [--schemes int8_group32_a16,int4_group32_zero_a16] [--reference]

One program multiplies with one weight after the other, as a model's step does, with weights enough
that no cache holds them; times are per product. Each round runs everything once, in turn, after
measuring the ceilings, so that what else the machine does hits all alike; the table shows medians
over rounds, of times and of ratios. "of reading": the time of reading the weight once at the
bandwidth of that round, as a share of the product's time; "of float32": its operations per second
against those of a large float32 matmul of XLA, which integers may exceed.
The XLA columns: float32 weights; and for int8 per row of x, an int8 product.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ceilings import MEBIBYTE, Runner, make_cpu_reader, make_multiplier, seconds
from jax import lax

from pallas_kernels.quantized_matmul import api, cases, cpu
from pallas_kernels.quantized_matmul.cases import Case
from pallas_kernels.quantized_matmul.quantize import round_integers
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight, Scheme

Multiply = Callable[[jax.Array, Any], jax.Array]
#: Bytes of weights that one program reads, and the most copies of one weight.
BYTES, MOST_COPIES = 96 * MEBIBYTE, 24
#: Products of so many rows are bounded by arithmetic: a few copies do.
MANY_ROWS, FEW_COPIES = 64, 3
XLA = "xla float32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Runners of one case by column; each runs `products` products and waits."""

    case: Case
    runners: dict[str, tuple[Runner, int]]


def xla_float32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, K] times float32 [N, K] transposed."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def xla_int8(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """int8_token by XLA's own int8 product; at least 8 rows, with which it is faster."""
    rows = len(x)
    values, scales = round_integers(jnp.pad(x, ((0, max(0, 8 - rows)), (0, 0))), "int8")
    out = lax.dot_general(
        values, weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return (out.astype(jnp.float32) * scales[:, None] * weight.scales[:, 0])[:rows]


def make_runner(multiply: Multiply, x: jax.Array, weight: Any) -> tuple[Runner, int]:
    """Products with copies of a weight, each waiting for the one before."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    copies = min(MOST_COPIES, -(-BYTES // size)) if len(x) < MANY_ROWS else FEW_COPIES
    weights = [jax.tree.map(lambda leaf: leaf + 0, weight) for _ in range(copies)]

    @jax.jit
    def chain(x: jax.Array, weights: list[Any]) -> jax.Array:
        for one in weights:
            out = multiply(x, one)
            x = x.at[0, 0].add(1e-30 * out[0, 0])
        return out

    def run() -> object:
        return chain(x, weights)

    jax.block_until_ready(run())
    return run, copies


def make_entry(case: Case, schemes: list[Scheme], with_reference: bool) -> Entry:
    """Everything that a case is measured with."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((case.out_size, case.in_size), np.float32))
    x = jnp.asarray(rng.standard_normal((case.rows, case.in_size), np.float32))
    runners = {XLA: make_runner(xla_float32, x, weight)}
    for scheme in schemes:
        if not case.fits(scheme):
            continue
        natural = api.quantize(weight, scheme)
        multiply = functools.partial(api.quantized_matmul, scheme=scheme)
        packed = api.pack(natural, scheme, implementation="cpu")
        ours = functools.partial(multiply, implementation="cpu")
        runners[scheme.name] = make_runner(ours, x, packed)
        if scheme.activations == "int8_token":
            runners[f"xla {scheme.name}"] = make_runner(xla_int8, x, natural)
        if with_reference:
            reference = functools.partial(multiply, implementation="reference")
            runners[f"reference {scheme.name}"] = make_runner(reference, x, natural)
    return Entry(case=case, runners=runners)


def measure(entries: list[Entry], rounds: int) -> dict[tuple[str, str], dict[str, float]]:
    """Medians over rounds, by case and column: seconds, and ratios to ceilings and to XLA."""
    read, rate = make_cpu_reader(os.cpu_count() or 1), make_multiplier(jnp.float32)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for entry in entries:
            bandwidth, arithmetic = read(), rate()
            times = {name: seconds(run, 4) / n for name, (run, n) in entry.runners.items()}
            for name, time in times.items():
                row = {
                    "seconds": time,
                    "xla x": times[XLA] / time,
                    "of float32": entry.case.operations / time / arithmetic,
                    "bandwidth": bandwidth,
                    "arithmetic": arithmetic,
                }
                if name in api.SCHEMES:
                    size = entry.case.weight_bytes(api.SCHEMES[name])
                    row["of reading"] = size / bandwidth / time
                found.setdefault((entry.case.name, name), []).append(row)
    return {
        key: {column: statistics.median(row[column] for row in rows) for column in rows[0]}
        for key, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--filter", default="smollm2", help="parts of cases' names, with commas")
    parser.add_argument(
        "--schemes", default="int8_group32_a16,int4_group32_zero_a16,int8_group32,int8_token"
    )
    parser.add_argument("--reference", action="store_true", help="the definition, too; slow")
    options = parser.parse_args()
    schemes = [api.named_scheme(name) for name in options.schemes.split(",")]
    for scheme in schemes:
        loaded = cpu.load(scheme)
        how = "loaded from the cache" if loaded.from_cache else "compiled"
        print(f"{loaded.target}: {how} in {loaded.seconds:.1f} s")
    parts = options.filter.split(",")
    chosen = [case for case in cases.FULL if any(part in case.name for part in parts)]
    if not chosen:
        parser.error(f"no case's name contains any of {options.filter}")
    table = measure(
        [make_entry(case, schemes, options.reference) for case in chosen], options.rounds
    )
    bandwidth, arithmetic = (
        statistics.median(row[name] for row in table.values())
        for name in ("bandwidth", "arithmetic")
    )
    print(f"reads {bandwidth / 1e9:.1f} GB/s, multiplies {arithmetic / 1e9:.0f} GFLOP/s in float32")
    print(f"{'case':24} {'':34} {'ms':>9} {'xla x':>6} {'of reading':>10} {'of float32':>10}")
    for (case, name), row in table.items():
        share = f"{row['of reading']:10.0%}" if "of reading" in row else f"{'':10}"
        print(
            f"{case:24} {name:34} {row['seconds'] * 1e3:9.3f} {row['xla x']:6.2f} {share} "
            f"{row['of float32']:10.2f}"
        )


if __name__ == "__main__":
    main()
