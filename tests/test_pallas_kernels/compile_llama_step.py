"""The engine's whole step for Llama-3.1-8B on a slice of TPUs, compiled from shapes alone.

    python tests/test_pallas_kernels/compile_llama_step.py --topology v6e:2x4 --tokens 64

prints what one chip holds and which collectives a step has. Needs libtpu, no TPU, no weights.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
import sys
import time

import compile_targets
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import EngineConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.compiling import ProgramMaker
from jaxserve.engine.device_state import LoadedModel
from jaxserve.models.loading import make_abstract_model
from jaxserve.parallel.mesh import make_mesh, sharding
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import api

MEBIBYTE = 2**20
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def llama_8b(num_layers: int = 32) -> ModelConfig:
    """Llama-3.1-8B, perhaps with fewer layers."""
    rope = RopeConfig(
        theta=500_000.0,
        rotary_dim=128,
        scaling_type="llama3",
        scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        ffn_size=14_336,
        max_position=131_072,
        layers=(LayerConfig(window=None, rope=rope),) * num_layers,
    )


def abstract_model(config: ModelConfig, mesh: jax.sharding.Mesh) -> LoadedModel:
    """The model on a mesh, every weight a shape with its sharding."""
    graphdef, state = nnx.split(make_abstract_model(config, jnp.bfloat16))
    flat = []
    for path, param in nnx.to_flat_state(state):
        value, axes = param.get_value(), param.get_metadata()["logical_axes"]
        place = sharding(mesh, axes, value.shape)
        stand_in = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place)
        flat.append((path, param.replace(stand_in)))
    weights, treedef = jax.tree.flatten(nnx.from_flat_state(flat))
    return LoadedModel(
        config=config,
        mesh=mesh,
        dtype=np.dtype(jnp.bfloat16),
        page_dtype=np.dtype(jnp.bfloat16),
        graphdef=graphdef,
        treedef=treedef,
        weights=tuple(weights),
    )


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
    mesh = make_mesh(len(chips), chips)
    model = abstract_model(llama_8b(num_layers), mesh)
    config = EngineConfig(
        model="shapes",
        dtype="bfloat16",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        tensor_parallel=len(chips),
    )
    choice = dispatch.choose(
        "paged_attention",
        platform="tpu",
        dtype=jnp.bfloat16,
        page_dtype=jnp.bfloat16,
        num_heads=32 // len(chips),
        num_kv_heads=8 // len(chips),
        head_size=128,
        page_size=config.page_size,
    )
    assert choice.implementation == "tpu", choice
    maker = ProgramMaker(
        config=config,
        device=dataclasses.replace(model, attention=choice),
        op=functools.partial(api.paged_attention, implementation=choice),
        pages_per_sequence=pages_per_sequence,
        num_pages=num_pages,
    )
    bucket = Bucket(tokens=num_tokens, rows=min(num_tokens, max_num_seqs))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return maker.compile_bucket(bucket), maker.compile_sample(bucket.rows), model


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each kind a step has."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text())
    return dict(collections.Counter(found))


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
