"""The engine's whole step, with the TPU kernel in it, compiles for slices of eight TPUs.

Llama-3.1-8B's shapes with two of its layers (layers are equal, and each costs seconds to
compile); `compile_llama_step.py` is the same from the command line, with all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import compile_llama_step
import compile_targets
import jax
import pytest
from compile_targets import MEBIBYTE

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

NUM_LAYERS, NUM_TOKENS, NUM_PAGES, PAGE_SIZE = 2, 64, 4096, 16


@pytest.fixture(scope="module", params=["v5e:2x4", "v6e:2x4"])
def program(request: pytest.FixtureRequest) -> Iterator[jax.stages.Compiled]:
    with compile_targets.libtpu_loaded():
        yield compile_llama_step.compile_step(
            request.param,
            num_layers=NUM_LAYERS,
            num_tokens=NUM_TOKENS,
            max_num_seqs=NUM_TOKENS,
            num_pages=NUM_PAGES,
            pages_per_sequence=256,
        )[0]


def test_the_pool_is_updated_in_place(program: jax.stages.Compiled) -> None:
    """Each chip holds one of the eight KV heads; its part of the pool is not copied."""
    pool = 2 * NUM_LAYERS * NUM_PAGES * PAGE_SIZE * 128 * 2
    assert program.memory_analysis().alias_size_in_bytes == pool
    # One kernel per layer, by its name, and no copy of a leaf of the pool.
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == NUM_LAYERS
    leaf = rf"bf16\[{NUM_LAYERS * NUM_PAGES},1,{PAGE_SIZE},128\]\S* copy"
    assert re.search(leaf, text) is None


def test_two_reductions_per_layer(program: jax.stages.Compiled) -> None:
    """One behind attention, one behind the feed-forward layer; and one behind the embedding."""
    assert compile_llama_step.collectives(program)["all-reduce"] == 2 * NUM_LAYERS + 1


def test_no_weight_is_gathered(program: jax.stages.Compiled) -> None:
    """Logits are put together from parts; were they asked for whole, the output head would be."""
    assert "bf16[128256,4096]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes <= 4 * MEBIBYTE
