"""Quantised models against the same weights, dequantised, as plain floats; on one device and several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import dense_logits, make_config

from jaxserve.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import make_random_model
from jaxserve.parallel.mesh import make_mesh
from jaxserve.quantization.weights import Quantization, WeightFormat
from pallas_kernels.quantized_matmul.scheme import named_scheme

pytestmark = pytest.mark.usefixtures("quick_compiler")

PROMPTS = [[5, 80, 3, 41, 9, 77, 2, 30, 11], [1, 2, 3]]
SIZES = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "head_size": 16, "ffn_size": 256}


def make_quantization(
    tensor_parallel: int, layers: str, embedding: str, implementation: str = "reference"
) -> Quantization:
    mesh = make_mesh(tensor_parallel)
    made = [
        WeightFormat(scheme=named_scheme(name), implementation=implementation, mesh=mesh)
        for name in (layers, embedding)
    ]
    return Quantization(layers=made[0], embedding=made[1])


def make_model(config: ModelConfig, tensor_parallel: int, layers: str, **other: str) -> Decoder:
    embedding = other.pop("embedding", "int8_group32")
    return make_random_model(
        config,
        make_mesh(tensor_parallel),
        dtype=jnp.float32,
        seed=7,
        quantization=make_quantization(tensor_parallel, layers, embedding, **other),
    )


def make_plain(config: ModelConfig) -> Decoder:
    """The same random weights, not quantised: those of a scheme that loses next to nothing."""
    return make_model(config, 1, "int8_group32", embedding="int8_group32")


def relative_error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in zip(got, want, strict=True))
    return float(np.sqrt(difference / sum(float(np.sum(b**2)) for b in want)))


@pytest.mark.parametrize(
    ("layers", "most"),
    [("int8_group32_a16", 1e-3), ("int8_group32_a8", 3e-2), ("int4_group32_zero_a16", 0.3)],
)
def test_near_the_finest_scheme(layers: str, most: float) -> None:
    """Rounding of activations alone, then of weights to 4 bits, too."""
    config = make_config(**SIZES, tie_embeddings=True)
    error = relative_error(
        dense_logits(make_model(config, 1, layers), PROMPTS),
        dense_logits(make_plain(config), PROMPTS),
    )
    assert 0 < error < most


@pytest.mark.parametrize(
    ("layers", "tie_embeddings"), [("int8_group32_a16", True), ("int4_group32_zero", False)]
)
def test_same_on_several_devices(layers: str, tie_embeddings: bool) -> None:
    config = make_config(**SIZES, tie_embeddings=tie_embeddings, attention_bias=True, ffn_bias=True)
    alone = dense_logits(make_model(config, 1, layers), PROMPTS)
    devices = 2 if tie_embeddings else 4
    shared = make_model(config, devices, layers)
    assert relative_error(dense_logits(shared, PROMPTS), alone) < 1e-4
    held = shared.layers[0].ffn.inputs.fused.values.get_value().addressable_shards[0]
    assert held.data.shape[0] == 2 * config.ffn_size // devices


def test_a_scale_per_row_is_one_per_device_where_columns_are_split() -> None:
    config = make_config(**SIZES, tie_embeddings=True)
    plain = dense_logits(make_plain(config), PROMPTS)
    shared = make_model(config, 2, "int8")
    assert relative_error(dense_logits(shared, PROMPTS), plain) < 2e-2
    assert shared.layers[0].ffn.down.scales.shape == (config.hidden_size, 2)


def test_an_odd_vocabulary_is_whole_on_every_device() -> None:
    config = make_config(**SIZES, tie_embeddings=True, vocab_size=95)
    alone = dense_logits(make_model(config, 1, "int8_group32"), PROMPTS)
    shared = dense_logits(make_model(config, 2, "int8_group32"), PROMPTS)
    assert relative_error(shared, alone) < 1e-4


def test_the_cpu_kernel_on_two_devices_equals_the_definition() -> None:
    config = make_config(**SIZES, tie_embeddings=True)
    defined = dense_logits(make_model(config, 1, "int8_group32_a16"), PROMPTS)
    kernel = make_model(config, 2, "int8_group32_a16", implementation="cpu")
    assert relative_error(dense_logits(kernel, PROMPTS), defined) < 1e-4


def test_biases_of_matrices_that_share_a_weight_lie_device_by_device() -> None:
    """A bias of 1 for q, 2 for k and 3 for v comes out again under its own name."""
    config = make_config(**SIZES, attention_bias=True)
    attention = make_model(config, 2, "int8_group32").layers[0].attention
    fused = attention.inputs.fused
    share = 8 * 16 // 2
    kv = 4 * 16 // 2
    one_device = np.concatenate([np.full(share, 1.0), np.full(kv, 2.0), np.full(kv, 3.0)])
    fused.bias.set_value(jnp.asarray(np.tile(one_device, 2), jnp.float32))
    q, k, v = attention.inputs(jnp.zeros((3, config.hidden_size)))
    assert (np.asarray(q) == 1).all()
    assert (np.asarray(k) == 2).all()
    assert (np.asarray(v) == 3).all()


def test_embedding_rows_are_those_of_the_definition() -> None:
    config = make_config(**SIZES, tie_embeddings=True)
    for devices in (1, 2):
        embed = make_model(config, devices, "int8_group32").embed
        rows = np.asarray(embed(jnp.array([0, 95, 50], jnp.int32)))
        # A head's logits for unit vectors are the embedding's columns.
        columns = np.asarray(embed.logits(jnp.eye(config.hidden_size)))
        np.testing.assert_allclose(rows, columns[:, [0, 95, 50]].T, rtol=1e-6, atol=1e-7)
        assert isinstance(embed(jnp.zeros(1, jnp.int32)), jax.Array)
