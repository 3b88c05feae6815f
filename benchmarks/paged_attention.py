"""Attention of one layer on this machine's CPU: the kernel, the definition, and the best of XLA.

    python benchmarks/paged_attention.py [--rounds 15] [--filter smollm2] [--page-size 16]
                                         [--page-dtype float32]

Each round runs everything once, in turn, so that what else the machine does hits all alike; the
table shows medians over rounds, and the median over rounds of the ratios. "of read" is the share
of the read bandwidth: both in the same round, large sequential reads by one thread per core.
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
from ceilings import make_cpu_reader, seconds

from pallas_kernels.paged_attention import api, cases, cpu, huge_pages
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, write_pages

Runner = Callable[[], None]


def tokens(pages: KVPages, index: Any) -> list[jax.Array]:
    """Keys and values of some pages, as what they stand for."""
    found = []
    for leaf, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        numbers = leaf[index]
        found.append(
            numbers if scale is None else numbers.astype(jnp.float32) * scale[index][..., None]
        )
    return found


def xla_mapped(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: PagedBatch, *, scale: float
) -> tuple[jax.Array, KVPages]:
    """Decode: one sequence after the other, gathered pages, two matmuls."""
    pages = write_pages(pages, k, v, batch)
    kv_heads, page_size, size = pages.k.shape[1:]
    length = batch.block_tables.shape[1] * page_size

    def one(argument: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, table, kv_len = argument
        keys, values = (
            leaf.transpose(1, 0, 2, 3).reshape(kv_heads, length, size)
            for leaf in tokens(pages, table)
        )
        logits = jnp.einsum("kgh,ksh->kgs", query.reshape(kv_heads, -1, size), keys) * scale
        logits = jnp.where(jnp.arange(length) < kv_len, logits, -1e30)
        return jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(logits, -1), values)

    out = jax.lax.map(one, (q, batch.block_tables, batch.kv_lens))
    return out.reshape(q.shape), pages


def xla_gathered(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: PagedBatch, *, scale: float
) -> tuple[jax.Array, KVPages]:
    """Decode: all sequences at once."""
    pages = write_pages(pages, k, v, batch)
    sequences, kv_heads, size = batch.kv_lens.shape[0], *pages.k.shape[1::2]
    keys, values = tokens(pages, batch.block_tables)  # [B, M, K, page_size, H]
    logits = jnp.einsum("bkgh,bmksh->bkgms", q.reshape(sequences, kv_heads, -1, size), keys)
    shape = logits.shape
    logits = logits.reshape(*shape[:3], -1) * scale
    seen = jnp.arange(logits.shape[-1]) < batch.kv_lens[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), -1).reshape(shape)
    return jnp.einsum("bkgms,bmksh->bkgh", weights, values).reshape(q.shape), pages


def xla_prefill(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: PagedBatch, *, scale: float
) -> tuple[jax.Array, KVPages]:
    """One chunk of one sequence: two-dimensional matmuls, one KV head after the other."""
    pages = write_pages(pages, k, v, batch)
    rows, _, size = q.shape
    kv_heads = k.shape[1]
    length = batch.block_tables.shape[1] * pages.k.shape[2]
    position = batch.kv_lens[0] - rows + jnp.arange(rows)
    seen = (jnp.arange(length)[None] <= position[:, None])[:, None]
    outputs = []
    for head in range(kv_heads):
        keys, values = (
            leaf.reshape(length, size) for leaf in tokens(pages, (batch.block_tables[0], head))
        )
        query = q.reshape(rows, kv_heads, -1, size)[:, head].reshape(-1, size)
        logits = jax.lax.dot(query, keys.T).reshape(rows, -1, length) * scale
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), -1).reshape(-1, length)
        outputs.append(jax.lax.dot(weights, values).reshape(rows, -1, size))
    return jnp.concatenate(outputs, 1), pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table: runners by column."""

    case: Case
    runners: dict[str, Runner]


def make_runner(attend: Callable[..., Any], inputs: cases.Inputs) -> Runner:
    """Runs a call with the pool donated, and waits."""
    scale = inputs.options["scale"]
    call = jax.jit(functools.partial(attend, scale=scale), donate_argnums=(3,))
    pool = [jax.tree.map(lambda leaf: leaf + 0, inputs.pages)]
    for leaf in jax.tree.leaves(pool[0]):
        huge_pages.use(leaf)

    def run() -> None:
        out, pool[0] = call(inputs.q, inputs.k, inputs.v, pool[0], inputs.batch)
        out.block_until_ready()

    run()
    return run


def make_entry(case: Case, page_dtype: str) -> Entry:
    inputs = cases.make_inputs(case, poison=False, page_dtype=page_dtype)
    xla: dict[str, Callable[..., Any]] = {"xla mapped": xla_mapped, "xla gathered": xla_gathered}
    if max(case.q_lens) > 1:
        xla = {"xla prefill": xla_prefill}
    attends = {
        "cpu": functools.partial(api.paged_attention, implementation="cpu"),
        "reference": functools.partial(api.paged_attention, implementation="reference"),
        **xla,
    }
    return Entry(case=case, runners={n: make_runner(a, inputs) for n, a in attends.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--filter", default="smollm2")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--page-dtype", default="float32", choices=cpu.PAGE_DTYPES)
    options = parser.parse_args()
    item_bytes = jnp.dtype(options.page_dtype).itemsize
    loaded = cpu.load(page_dtype=options.page_dtype)
    how = "loaded from the cache" if loaded.from_cache else "compiled"
    print(f"kernel {how} in {loaded.seconds:.1f} s ({loaded.cpu_seconds:.1f} CPU seconds)")
    chosen = [case for case in cases.FULL if options.filter in case.name]
    entries = [
        make_entry(dataclasses.replace(c, page_size=options.page_size), options.page_dtype)
        for c in chosen
    ]
    read = make_cpu_reader(os.cpu_count() or 1)
    bandwidth: list[float] = []
    times: dict[tuple[str, str], list[float]] = {}
    shares: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for entry in entries:
            bandwidth.append(read() / 1e9)
            for name, run in entry.runners.items():
                spent = seconds(run, 2 if name == "reference" else 5)
                times.setdefault((entry.case.name, name), []).append(spent)
            rate = item_bytes * entry.case.kv_elements / times[entry.case.name, "cpu"][-1] / 1e9
            shares.setdefault(entry.case.name, []).append(rate / bandwidth[-1])
    print(f"read bandwidth: {statistics.median(bandwidth):.1f} GB/s, best {max(bandwidth):.1f}")
    print(f"{'case':28} {'cpu ms':>8} {'GB/s':>6} {'of read':>8} {'xla ms':>8} {'x':>5}", end=" ")
    print(f"{'reference ms':>13} {'x':>5}")
    for entry in entries:
        case = entry.case.name
        mine = times[case, "cpu"]
        columns = {name: times[case, name] for name in entry.runners}
        medians = {name: statistics.median(values) for name, values in columns.items()}
        best_xla = min((n for n in columns if n.startswith("xla")), key=medians.__getitem__)

        def ratio(name: str, columns: dict[str, list[float]] = columns) -> float:
            pairs = zip(columns[name], columns["cpu"], strict=True)
            return statistics.median(other / own for other, own in pairs)

        rate = item_bytes * entry.case.kv_elements / statistics.median(mine) / 1e9
        print(
            f"{case:28} {medians['cpu'] * 1e3:8.3f} {rate:6.1f} "
            f"{statistics.median(shares[case]):8.0%} {medians[best_xla] * 1e3:8.2f} "
            f"{ratio(best_xla):5.1f} {medians['reference'] * 1e3:13.2f} {ratio('reference'):5.1f}"
        )


if __name__ == "__main__":
    main()
