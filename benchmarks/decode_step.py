"""A whole decode step on this machine's CPU, against reading its weights and KV pages once.

    python benchmarks/decode_step.py --model FILE [--context 640] [--rounds 11] [--batch 1 8]

Per batch: the engine's own `forward` program of that bucket; all its matrix products alone, one
after the other, by XLA and by the kernel of `float_matmul` (which is XLA's for one row); its
attention of all layers alone; and what reading takes. Each round runs
everything once, in turn, after measuring the bandwidth (one plain loop per core over memory much
larger than the caches); the table shows medians over rounds, of times and of ratios.

Bytes that a step reads: every weight once; of the embedding table only the rows of the batch's
tokens, unless it is also the output head, which is read whole, once; K and V of all tokens of all
sequences in all layers. Activations and block tables are left out: they stay in the caches.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ceilings import make_cpu_reader, seconds
from flax import nnx

from checkpoints.open import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.compiling import ProgramMaker
from jaxserve.engine.device_state import LoadedModel, device_state_maker
from jaxserve.engine.product_choice import choose_float_products
from jaxserve.engine.programs import StepShape, forward_layout
from jaxserve.models.loading import load_model
from jaxserve.parallel.mesh import make_mesh
from pallas_kernels import dispatch
from pallas_kernels.float_matmul.api import float_matmul
from pallas_kernels.paged_attention.api import KVPages, PagedBatch, make_pages, paged_attention

Runner = Callable[[], object]
#: Ways to multiply, and the implementation of `float_matmul` that each is.
PRODUCTS = {"XLA's products": "reference", "float_matmul": "cpu"}


def load(path: pathlib.Path, config: EngineConfig) -> LoadedModel:
    """The model in float32, with the attention and the products that `dispatch` chooses."""
    mesh = make_mesh(1)
    model, decoder = load_model(open_checkpoint(path), mesh, dtype=jnp.float32)
    choose_float_products(decoder, mesh, np.dtype("float32"), dispatch.AUTO)
    graphdef, state = nnx.split(decoder)
    weights, treedef = jax.tree.flatten(state)
    choice = dispatch.choose(
        "paged_attention",
        platform="cpu",
        dtype=jnp.float32,
        page_dtype=jnp.float32,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        page_size=config.page_size,
    )
    print(choice)
    return LoadedModel(
        config=model,
        mesh=mesh,
        dtype=np.dtype("float32"),
        page_dtype=np.dtype("float32"),
        graphdef=graphdef,
        treedef=treedef,
        weights=tuple(weights),
        attention=choice,
    )


def bytes_read(model: LoadedModel, batch: int, context: int) -> tuple[int, int]:
    """Of weights and of KV pages; see above for what is counted."""
    config = model.config
    weights = sum(leaf.nbytes for leaf in model.weights)
    rows = 4 * batch * config.hidden_size
    table = 4 * config.vocab_size * config.hidden_size
    weights += rows if config.tie_embeddings else rows - table
    kv = 4 * 2 * config.num_kv_heads * config.head_size * batch * context * config.num_layers
    return weights, kv


def make_batch(batch: int, context: int, page_size: int, num_pages: int) -> PagedBatch:
    """Every sequence decodes its context-th token; pages in random order."""
    per_sequence = -(-context // page_size)
    order = np.random.default_rng(0).permutation(np.arange(1, num_pages))
    return PagedBatch(
        jnp.asarray(order[: batch * per_sequence].reshape(batch, per_sequence), jnp.int32),
        jnp.arange(batch + 1, dtype=jnp.int32),
        jnp.full((batch,), context, jnp.int32),
    )


def step_runner(
    model: LoadedModel, config: EngineConfig, batch: PagedBatch, num_pages: int
) -> Runner:
    """The engine's `forward` of the bucket."""
    size, per_sequence = batch.block_tables.shape
    bucket = Bucket(tokens=size, rows=size)
    op = functools.partial(paged_attention, implementation=model.attention)
    maker = ProgramMaker(
        config=config, device=model, op=op, pages_per_sequence=per_sequence, num_pages=num_pages
    )
    program = maker.compile_bucket(bucket)
    shape = StepShape(bucket=bucket, pages_per_sequence=per_sequence)
    packed, views = forward_layout(shape).make_buffer()
    views["token_ids"][:] = np.random.default_rng(1).integers(0, model.config.vocab_size, size)
    views["cu_q_lens"][:], views["kv_lens"][:] = batch.cu_q_lens, batch.kv_lens
    views["sampled"][:] = np.arange(size)
    views["block_tables"][:] = batch.block_tables
    state, sampling = device_state_maker(config, model, num_pages)()
    pages = [state]

    def run() -> object:
        pages[0], logits = program(model.weights, pages[0], sampling.last_token, packed)
        return logits

    return run


def products_runner(model: LoadedModel, batch: int, implementation: str) -> Runner:
    """Every two-dimensional weight times `batch` rows, one after the other."""
    matrices = [leaf for leaf in model.weights if leaf.ndim == 2]

    def products(matrices: list[jax.Array]) -> list[jax.Array]:
        outs: list[jax.Array] = []
        for matrix in matrices:
            x = jnp.ones((batch, matrix.shape[1]), jnp.float32)
            if outs:
                x, _ = jax.lax.optimization_barrier((x, outs[-1]))
            outs.append(float_matmul(x, matrix, implementation=implementation))
        return outs

    call = jax.jit(products).lower(matrices).compile()
    return lambda: call(matrices)


def attention_runner(
    model: LoadedModel, config: EngineConfig, batch: PagedBatch, num_pages: int
) -> Runner:
    """Attention of all layers, each over pages of its own."""
    sizes = model.config
    rng = np.random.default_rng(2)
    rows = batch.kv_lens.shape[0]
    q, k, v = (
        jnp.asarray(rng.standard_normal((rows, heads, sizes.head_size), np.float32))
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    pages = make_pages(
        sizes.num_layers * num_pages,
        sizes.num_kv_heads,
        config.page_size,
        sizes.head_size,
        implementation=model.attention,
    )

    def layers(q: jax.Array, pages: KVPages, batch: PagedBatch) -> tuple[jax.Array, KVPages]:
        for layer in range(sizes.num_layers):
            shifted = batch._replace(block_tables=batch.block_tables + layer * num_pages)
            q, pages = paged_attention(
                q, k, v, pages, shifted, scale=0.125, implementation=model.attention
            )
        return q, pages

    call = jax.jit(layers, donate_argnums=(1,)).lower(q, pages, batch).compile()
    pool = [pages]

    def run() -> object:
        out, pool[0] = call(q, pool[0], batch)
        return out

    return run


def report(
    batch: int,
    num_bytes: tuple[int, int],
    bandwidth: list[float],
    times: dict[tuple[int, str], list[float]],
) -> None:
    """Prints one batch: medians of times, and of times as multiples of reading the part's bytes."""
    weights, kv = num_bytes
    lines = {"step": (times[batch, "step"], weights + kv)}
    for name in PRODUCTS:
        lines[name] = times[batch, name], weights
    lines["attention"] = times[batch, "attention"], kv
    for name in PRODUCTS:
        pairs = zip(times[batch, name], times[batch, "attention"], strict=True)
        lines[f"{name} and attention"] = [a + b for a, b in pairs], weights + kv
    print(f"batch {batch}: {weights / 1e6:.1f} MB of weights, {kv / 1e6:.1f} MB of KV pages")
    for name, (spent, size) in lines.items():
        ratio = statistics.median(t * rate / size for t, rate in zip(spent, bandwidth, strict=True))
        print(f"  {name:32} {statistics.median(spent) * 1e3:8.2f} ms, {ratio:5.2f} of reading")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args()
    num_pages = 1 + max(options.batch) * -(-options.context // options.page_size)
    config = EngineConfig(num_pages=num_pages, page_size=options.page_size, max_num_seqs=8)
    model = load(options.model, config)
    runners: dict[tuple[int, str], Runner] = {}
    for batch in options.batch:
        plan = make_batch(batch, options.context, options.page_size, num_pages)
        runners[batch, "step"] = step_runner(model, config, plan, num_pages)
        for name, implementation in PRODUCTS.items():
            runners[batch, name] = products_runner(model, batch, implementation)
        runners[batch, "attention"] = attention_runner(model, config, plan, num_pages)
    for run in runners.values():
        jax.block_until_ready(run())
    read = make_cpu_reader(os.cpu_count() or 1)
    bandwidth: list[float] = []
    times: dict[tuple[int, str], list[float]] = {key: [] for key in runners}
    for _ in range(options.rounds):
        bandwidth.append(read())
        for key, run in runners.items():
            times[key].append(seconds(run, 3))
    print(f"read bandwidth: {statistics.median(bandwidth) / 1e9:.1f} GB/s")
    for batch in options.batch:
        report(batch, bytes_read(model, batch, options.context), bandwidth, times)


if __name__ == "__main__":
    main()
