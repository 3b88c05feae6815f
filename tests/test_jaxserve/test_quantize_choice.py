"""Which form weights get: what auto chooses, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from model_steps import make_config

from checkpoints.reader import TensorInfo
from jaxserve.config import EngineConfig
from jaxserve.engine.quantize_choice import choose_quantization, describe, named_quantization
from jaxserve.errors import UsageError
from jaxserve.parallel.mesh import make_abstract_mesh, make_mesh

SIZES = {
    "hidden_size": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_size": 16,
    "ffn_size": 256,
    "vocab_size": 96,
}


@dataclasses.dataclass
class Tensors:
    """A reader that has tensors of one format in its layers."""

    layers: str

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        found = {
            "token_embd.weight": "Q8_0",
            "blk.0.attn_q.weight": self.layers,
            "blk.0.ffn_up.weight": "Q4_1",
        }
        matrices = {
            name: TensorInfo(name=name, shape=(64, 64), dtype=dtype)
            for name, dtype in found.items()
        }
        norm = TensorInfo(name="blk.0.attn_norm.weight", shape=(64,), dtype="float32")
        return matrices | {norm.name: norm}


def choose(layers: str = "Q4_1", kernels: str = "auto", **settings: Any) -> str:
    settings.setdefault("quantization", "auto")
    sizes = {name: settings.pop(name) for name in list(settings) if name in SIZES}
    quantization = choose_quantization(
        EngineConfig(**settings),
        make_config(**(SIZES | sizes)),
        Tensors(layers),  # type: ignore[arg-type]
        make_mesh(settings.get("tensor_parallel", 1)),
        np.dtype(np.float32),
        kernels,
    )
    return describe(quantization, np.dtype(np.float32))


def test_auto_keeps_the_blocks_of_a_file_and_else_takes_bytes() -> None:
    assert choose("Q4_1") == "int4_group32_zero_a16, embedding int8_group32_a16"
    assert choose("Q4_0") == "int4_group32_zero_a16, embedding int8_group32_a16"
    assert choose("Q6_K") == "int8_group32_a16"
    assert choose("bfloat16") == "int8_group32_a16"


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "none"},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"kernels": "reference"},
        {"ffn_size": 48},  # no whole number of groups
        {"vocab_size": 95},  # no whole number of panels
    ],
)
def test_auto_leaves_floats(settings: dict[str, Any]) -> None:
    assert choose(**settings) == "float32"


def test_a_named_scheme_is_taken_whatever_the_file_and_the_kernels() -> None:
    assert choose(quantization="int8_group32") == "int8_group32"
    assert choose(quantization="int8", dtype="float32", kernels="reference") == "int8"
    assert choose(quantization="int4_group64", vocab_size=95).startswith("int4_group64, embedding")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int3"}, "there is no quantisation 'int3'; use int8"),
        ({"quantization": "int8_group128"}, "rows of 64 weights are not made of groups of 128"),
        ({"quantization": "int8_group32", "tensor_parallel": 4, "ffn_size": 64}, "groups of 32"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(**settings)


def test_a_plan_wants_fast_products() -> None:
    settings: Any = (make_config(**SIZES), make_abstract_mesh(2), "gpu", np.dtype(np.float32))
    config = EngineConfig(quantization="int8_group32_a16")
    message = r"no fast product for int8_group32_a16: .*not gpu: .*no tensor core multiplies int16"
    with pytest.raises(UsageError, match=message):
        named_quantization(config, *settings, "auto", fast_only=True)
    found = named_quantization(config, *settings, "auto")
    assert found is not None
    assert found.layers.implementation == "reference"
