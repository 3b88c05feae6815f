"""The engine's whole step for Llama-3.1-8B on a slice of TPUs, compiled from shapes alone.

    python tests/test_pallas_kernels/compile_llama_step.py --topology v6e:2x4 --tokens 64

prints what one chip holds and which collectives a step has. Needs libtpu, no TPU, no weights.
`jaxserve plan` does the same for users; this is for those who change the step.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import compile_targets
import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device_state import LoadedModel
from jaxserve.parallel.mesh import make_mesh
from jaxserve.plan.collectives import read_collectives
from jaxserve.plan.measure import (
    abstract_model,
    compile_forward,
    compile_sample,
    shallow,
    step_maker,
)
from jaxserve.plan.shapes import read_shape

MEBIBYTE = 2**20


def compile_step(
    topology: str,
    *,
    num_layers: int,
    num_tokens: int,
    max_num_seqs: int,
    num_pages: int,
    pages_per_sequence: int,
) -> tuple[jax.stages.Compiled, jax.stages.Compiled, LoadedModel]:
    """`forward` of one bucket and the `sample` behind it, all chips sharing every layer."""
    chips = compile_targets.devices(topology)
    config = EngineConfig(
        model="llama-3.1-8b",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        max_model_len=pages_per_sequence * EngineConfig().page_size,
        tensor_parallel=len(chips),
    )
    model, _ = read_shape(config.model, pathlib.Path())
    device = abstract_model(
        config, shallow(model, num_layers), make_mesh(len(chips), chips), platform="tpu"
    )
    maker = step_maker(config, device, num_pages)
    bucket = Bucket(tokens=num_tokens, rows=min(num_tokens, max_num_seqs))
    return compile_forward(maker, bucket), compile_sample(maker, bucket.sampled), device


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each kind a step has."""
    found = read_collectives(program.as_text() or "", num_devices=1)
    return {kind: traffic.count for kind, traffic in found.items()}


def main(arguments: list[str]) -> None:
    """Compiles one step and prints what it takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-seqs", type=int, default=64)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--pages-per-sequence", type=int, default=256)
    given = parser.parse_args(arguments)
    start = time.monotonic()
    with compile_targets.libtpu_loaded():
        forward, sample, model = compile_step(
            given.topology,
            num_layers=given.layers,
            num_tokens=given.tokens,
            max_num_seqs=given.max_seqs,
            num_pages=given.pages,
            pages_per_sequence=given.pages_per_sequence,
        )
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in model.weights)
    print(f"{given.topology}: compiled in {time.monotonic() - start:.1f} s; per chip, in MiB:")
    print(f"{'weights':>20} {weights / model.mesh.size / MEBIBYTE:10.1f}")
    for name, program in (("forward", forward), ("sample", sample)):
        memory = program.memory_analysis()
        print(f"{name}: collectives {collectives(program)}")
        for what, size in (
            ("arguments", memory.argument_size_in_bytes),
            ("updated in place", memory.alias_size_in_bytes),
            ("temporaries", memory.temp_size_in_bytes),
            ("program", memory.generated_code_size_in_bytes),
        ):
            print(f"{what:>20} {size / MEBIBYTE:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
