"""From files to sharded parameters: layouts, contradictions, splitting and memory."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from model_steps import dense_logits, make_config, open_golden

from checkpoints.errors import CheckpointFormatError
from checkpoints.open import open_checkpoint
from checkpoints.orbax_reader import OrbaxReader
from checkpoints.orbax_writer import write_checkpoint
from checkpoints.reader import CheckpointReader, TensorInfo
from jaxserve.errors import UsageError
from jaxserve.models import shards
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_model, make_random_model
from jaxserve.models.shards import read_shard, separate_pairs
from jaxserve.models.sources import Source
from jaxserve.parallel.mesh import make_mesh

MEGABYTE = 2**20


class MemoryReader:
    """A checkpoint in memory. `reads` lists what was asked for."""

    def __init__(
        self, config: Mapping[str, Any], arrays: dict[str, np.ndarray], convention: str = "hf"
    ) -> None:
        self.convention = convention
        self.config = config
        self.arrays = arrays
        self.reads: list[tuple[str, tuple[int, ...]]] = []

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(name=name, shape=array.shape, dtype=array.dtype.name)
            for name, array in self.arrays.items()
        }

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        part = self.arrays[name][tuple(index or ())]
        self.reads.append((name, part.shape))
        return part

    def tokenizer_files(self) -> Any:
        raise NotImplementedError


def copy_to_memory(reader: CheckpointReader, **config: Any) -> MemoryReader:
    arrays = {name: reader.read(name) for name in reader.tensors}
    return MemoryReader({**reader.config, **config}, arrays)


def llama_hf(num_heads: int = 8, num_kv_heads: int = 4) -> MemoryReader:
    """A tied Llama under Hugging Face names, random but fixed."""
    sizes = {"q": num_heads * 8, "k": num_kv_heads * 8, "v": num_kv_heads * 8}
    shapes = {"model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        base = f"model.layers.{layer}"
        for name, rows in sizes.items():
            shapes[f"{base}.self_attn.{name}_proj.weight"] = (rows, 32)
        shapes[f"{base}.self_attn.o_proj.weight"] = (32, num_heads * 8)
        shapes[f"{base}.mlp.gate_proj.weight"] = (48, 32)
        shapes[f"{base}.mlp.up_proj.weight"] = (48, 32)
        shapes[f"{base}.mlp.down_proj.weight"] = (32, 48)
        shapes[f"{base}.input_layernorm.weight"] = (32,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (32,)
    generator = np.random.default_rng(3)
    arrays = {
        name: generator.normal(size=shape).astype(np.float32) * 0.2
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
    }
    return MemoryReader(config, arrays)


def to_gguf(reader: MemoryReader) -> MemoryReader:
    """The same model the way llama.cpp's converter writes it, q and k rows permuted."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    arrays = {}
    for name, array in reader.arrays.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "attn_q" in name or "attn_k" in name:
            heads = array.shape[0] // 8
            array = array.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(array.shape)
        arrays[name] = array
    config = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": reader.config["num_attention_heads"],
        "llama.attention.head_count_kv": reader.config["num_key_value_heads"],
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }
    return MemoryReader(config, arrays, convention="gguf")


def parameters(decoder: Decoder) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(param.get_value())
        for path, param in nnx.to_flat_state(nnx.state(decoder))
    }


@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_gguf_and_hf_give_the_same_parameters(tensor_parallel: int) -> None:
    hf, mesh = llama_hf(), make_mesh(tensor_parallel)
    hf_config, hf_decoder = load_model(hf, make_mesh(1), dtype=jnp.float32)
    gguf_config, gguf_decoder = load_model(to_gguf(hf), mesh, dtype=jnp.float32)
    assert hf_config == gguf_config
    wanted, found = parameters(hf_decoder), parameters(gguf_decoder)
    assert wanted.keys() == found.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def test_each_device_reads_only_its_part() -> None:
    reader = llama_hf()
    load_model(reader, make_mesh(4), dtype=jnp.float32)
    shapes = {name: [] for name in reader.arrays}
    for name, shape in reader.reads:
        shapes[name].append(shape)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [(16, 32)] * 4
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == [(32, 16)] * 4
    assert shapes["model.embed_tokens.weight"] == [(24, 32)] * 4
    assert shapes["model.norm.weight"] == [(32,)]  # once for all devices


def test_parts_larger_than_a_block_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", 16 * 32 * 4)
    reader = to_gguf(llama_hf())
    _, decoder = load_model(reader, make_mesh(1), dtype=jnp.bfloat16)
    assert max(shape[0] for _, shape in reader.reads) <= 32
    hf = llama_hf().arrays["model.layers.1.self_attn.q_proj.weight"]
    found = np.asarray(decoder.layers[1].attention.inputs.q.weight[...])
    np.testing.assert_array_equal(found, hf.astype(ml_dtypes.bfloat16))


def test_sources_with_an_offset_and_a_sum() -> None:
    array = np.arange(24, dtype=np.float32).reshape(8, 3)
    reader = MemoryReader({}, {"fused": array})
    source = Source(name="fused", shape=(8, 3), first_row=2, add=-1.0)
    found = read_shard(reader, source, ((1, 4), (0, 2)), np.dtype(np.float32))
    np.testing.assert_array_equal(found, array[3:6, :2] - 1)


def test_separate_pairs_undoes_the_permutation() -> None:
    rows = np.array([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17])
    wanted = [*range(8), *range(10, 18)]
    assert separate_pairs(rows, 8).tolist() == wanted


def test_all_contradictions_are_named_at_once() -> None:
    reader = llama_hf()
    del reader.arrays["model.norm.weight"]
    reader.arrays["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    reader.arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((47, 32), np.float32)
    with pytest.raises(CheckpointFormatError) as found:
        load_model(reader, make_mesh(1), dtype=jnp.float32)
    message = str(found.value)
    for name in ("model.norm.weight", "layers.7.mlp.up_proj", "layers.0.mlp.up_proj"):
        assert name in message
    assert "47x32" in message
    assert "\n" not in message
    assert not reader.reads  # found before any weight was read


def test_config_that_contradicts_the_tensors(golden: pathlib.Path) -> None:
    reader = copy_to_memory(open_golden(golden / "b" / "llama"), num_hidden_layers=4)
    with pytest.raises(CheckpointFormatError, match=r"model\.layers\.3"):
        load_model(reader, make_mesh(1), dtype=jnp.float32)


def test_tensors_without_use_do_not_disturb() -> None:
    reader = llama_hf()
    reader.arrays["lm_head.weight"] = reader.arrays["model.embed_tokens.weight"]
    reader.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    load_model(reader, make_mesh(1), dtype=jnp.float32)


def test_llama3_scaling_of_gguf_files_is_the_same_as_of_hf_files() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    hf = llama_hf()
    gguf = to_gguf(hf)
    hf.config = {**hf.config, "rope_parameters": rope}
    # llama.cpp's converter, written out: wavelength against the old context.
    factors = []
    for number in range(4):
        wavelength = 2 * np.pi * 10_000.0 ** (number / 4)
        smooth = min(max((32 / wavelength - 1.0) / 3.0, 0.0), 1.0)
        factors.append(1 / (smooth + (1 - smooth) / 8))
    gguf.arrays["rope_freqs.weight"] = np.array(factors, np.float32)
    sequence = [list(range(0, 90, 2))]
    _, left = load_model(hf, make_mesh(1), dtype=jnp.float32)
    _, right = load_model(gguf, make_mesh(1), dtype=jnp.float32)
    wanted, found = dense_logits(left, sequence)[0], dense_logits(right, sequence)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_heads_that_cannot_be_split_are_refused_before_reading() -> None:
    reader = llama_hf(num_heads=9, num_kv_heads=3)
    with pytest.raises(UsageError, match=r"2 does not divide .*key-value heads \(3\)"):
        load_model(reader, make_mesh(2), dtype=jnp.float32)
    assert not reader.reads


@pytest.mark.parametrize("convention", ["hf", "gguf"])
def test_orbax_restores_into_the_shardings(convention: str, tmp_path: pathlib.Path) -> None:
    source = llama_hf() if convention == "hf" else to_gguf(llama_hf())
    write_checkpoint(
        tmp_path / "model",
        convention=convention,
        config=source.config,
        tensors=source.arrays.items(),
        tokenizer=None,
    )
    reader = open_checkpoint(tmp_path / "model")
    assert isinstance(reader, OrbaxReader)
    read = reader.read
    reads: list[str] = []

    def spy(name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        reads.append(name)
        return read(name, index)

    reader.read = spy  # type: ignore[method-assign]
    _, decoder = load_model(reader, make_mesh(4), dtype=jnp.float32)
    # Only what is laid out otherwise (llama.cpp's q and k) goes through our own reading.
    assert {name.split(".")[2] for name in reads} == (
        set() if convention == "hf" else {"attn_q", "attn_k"}
    )
    _, wanted = load_model(llama_hf(), make_mesh(4), dtype=jnp.float32)
    found = parameters(decoder)
    for path, array in parameters(wanted).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    shards = decoder.layers[0].ffn.inputs.up.weight.get_value().addressable_shards
    assert [shard.data.shape for shard in shards] == [(12, 32)] * 4


def test_random_weights_do_not_depend_on_the_mesh() -> None:
    config = make_config(tie_embeddings=False, attention_bias=True)
    one = parameters(make_random_model(config, make_mesh(1), dtype=jnp.bfloat16, seed=4))
    four = parameters(make_random_model(config, make_mesh(4), dtype=jnp.bfloat16, seed=4))
    other = parameters(make_random_model(config, make_mesh(1), dtype=jnp.bfloat16, seed=5))
    for path, array in one.items():
        np.testing.assert_array_equal(four[path], array, err_msg=path)
    weight = one["layers.0.ffn.inputs.up.weight"].astype(np.float32)
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    assert (weight == other["layers.0.ffn.inputs.up.weight"].astype(np.float32)).mean() < 0.1
    assert (one["layers.1.attention_norm.weight"] == 1).all()
    assert (one["layers.1.attention.inputs.q.bias"] == 0).all()


MEASURE = """
import json, pathlib, resource, sys, threading
import jax, jax.numpy as jnp
from flax import nnx
from checkpoints.open import open_checkpoint
from jaxserve.models.loading import load_model
from jaxserve.parallel.mesh import make_mesh

def status(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

mesh = make_mesh(1)
jax.block_until_ready(jax.device_put(jnp.zeros(8)))
before = status("VmRSS")
reader = open_checkpoint(pathlib.Path(sys.argv[1]))
_, decoder = load_model(reader, mesh, dtype=jnp.dtype(sys.argv[2]))
leaves = jax.tree.leaves(nnx.state(decoder))
jax.block_until_ready(leaves)
print(json.dumps({
    "extra": status("VmHWM") - before,
    "final": sum(leaf.nbytes for leaf in leaves),
    "largest": max(leaf.nbytes for leaf in leaves),
}))
"""


def measure(path: pathlib.Path, dtype: str) -> dict[str, int]:
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), dtype],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, int] = json.loads(done.stdout)
    print({key: f"{value / MEGABYTE:.0f} MB" for key, value in result.items()})
    return result


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_smollm2(smollm2_gguf: pathlib.Path) -> None:
    found = measure(smollm2_gguf, "bfloat16")
    assert found["extra"] < found["final"] + found["largest"] + 500 * MEGABYTE


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_gemma3(gemma3_gguf: pathlib.Path, dtype: str) -> None:
    found = measure(gemma3_gguf, dtype)
    assert found["extra"] < found["final"] + found["largest"] + 500 * MEGABYTE
