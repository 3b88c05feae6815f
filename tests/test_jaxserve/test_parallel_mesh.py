"""The mesh, its table of rules, and models split over several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from model_steps import dense_logits, make_config, paged_logits

from jaxserve.errors import ResourceError, UsageError
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import make_random_model, parameter_infos
from jaxserve.parallel.mesh import (
    LOGICAL_RULES,
    check_divisible,
    make_mesh,
    sharding,
    tensor_parallel_size,
)

PROMPTS = [[5, 80, 3, 41, 9, 77, 2, 30, 11], [1, 2, 3], list(range(20, 59))]


def make_model(tensor_parallel: int, **changes: object) -> Decoder:
    mesh = make_mesh(tensor_parallel)
    return make_random_model(make_config(**changes), mesh, dtype=jnp.float32, seed=7)


def test_one_device_is_a_mesh_of_one() -> None:
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {"data": 1, "tensor": 1}
    assert tensor_parallel_size(make_mesh(4)) == 4


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=r"16 .* 8 cpu devices"):
        make_mesh(16)
    with pytest.raises(ResourceError, match=r"2 .* 1 cpu"):
        make_mesh(2, jax.devices()[:1])
    with pytest.raises(UsageError, match="0"):
        make_mesh(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, r"2 does not divide .* key-value heads \(3\)"),
        ({"ffn_size": 33}, r"2 does not divide .* width \(33\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_divisible(make_config(**changes), make_mesh(2))
    with pytest.raises(UsageError, match=message):
        make_model(2, **changes)


def test_sharding_checks_sizes_and_leaves_an_odd_vocabulary_whole() -> None:
    mesh = make_mesh(4)
    assert sharding(mesh, ("vocab", "embed"), (8, 3)).spec == PartitionSpec("tensor", None)
    assert sharding(mesh, ("vocab", "embed"), (7, 3)).spec == PartitionSpec(None, None)
    with pytest.raises(UsageError, match=r"'ffn' of size 6 .* 4 devices"):
        sharding(mesh, ("ffn",), (6,))


def test_every_parameter_names_axes_of_the_table() -> None:
    config = make_config(attention_bias=True, qk_norm=True, post_norms=True, ffn_bias=True)
    for path, info in parameter_infos(config, jnp.bfloat16).items():
        assert len(info.logical_axes) == len(info.shape), path
        assert all(axis in LOGICAL_RULES for axis in info.logical_axes), path
        assert info.dtype == (jnp.float32 if "norm" in path else jnp.bfloat16), path


def test_weights_are_split_not_copied() -> None:
    decoder = make_model(4)
    block = decoder.layers[0]
    for weight, part in (
        (decoder.embed.weight, (24, 32)),
        (block.attention.inputs.q.weight, (16, 32)),
        (block.attention.inputs.k.weight, (8, 32)),
        (block.attention.o.weight, (32, 16)),
        (block.ffn.inputs.up.weight, (12, 32)),
        (block.ffn.down.weight, (32, 12)),
    ):
        shards = weight.get_value().addressable_shards
        assert [shard.data.shape for shard in shards] == [part] * 4


@pytest.mark.parametrize(("tensor_parallel", "vocab_size"), [(2, 97), (4, 96)])
def test_split_model_gives_the_same_logits(tensor_parallel: int, vocab_size: int) -> None:
    one, several = (
        make_model(1, vocab_size=vocab_size),
        make_model(tensor_parallel, vocab_size=vocab_size),
    )
    mesh = make_mesh(tensor_parallel)
    wanted = dense_logits(one, PROMPTS)
    found = paged_logits(several, mesh, PROMPTS, [4, 1, 7])
    for left, right in zip(wanted, found, strict=True):
        np.testing.assert_allclose(right, left, atol=2e-5)
        assert (left.argmax(-1) == right.argmax(-1)).all()
