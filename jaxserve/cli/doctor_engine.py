"""The doctor's look at devices and at what the settings resolve to; loads no weights."""

from __future__ import annotations

import math
import os
import pathlib
from typing import TYPE_CHECKING

from jaxserve.cli.doctor_report import Section, megabytes
from jaxserve.config import EngineConfig, ModelConfig, cache_folder
from jaxserve.errors import USER_ERRORS, ResourceError

if TYPE_CHECKING:
    import jax
    import numpy as np

    from pallas_kernels.dispatch import Choice

#: Devices that a driver makes -> (what it is, the extra that makes JAX use it).
ACCELERATORS = {
    "/dev/nvidia0": ("an NVIDIA GPU", "cuda13"),
    "/dev/accel0": ("a TPU", "tpu"),
}


def look_at_devices(config: EngineConfig, root: pathlib.Path = pathlib.Path("/")) -> Section:
    """What JAX computes on, and whether it overlooks an accelerator. root: for tests."""
    import jax

    from jaxserve.engine.memory import host_free_bytes
    from jaxserve.parallel.mesh import make_mesh

    section = Section(title="devices")
    section.say("main memory", f"{megabytes(host_free_bytes())} free")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        section.complain(
            f"JAX finds no device: {error}; with JAX_PLATFORMS=cpu it uses the processor"
        )
        return section
    section.say("platform", devices[0].platform)
    for device in devices:
        stats = device.memory_stats() or {} if device.platform != "cpu" else {}
        limit = stats.get("bytes_limit")
        section.say(str(device), device.device_kind + (f", {megabytes(limit)}" if limit else ""))
    if devices[0].platform == "cpu":
        for path, (what, extra) in ACCELERATORS.items():
            if (root / path.lstrip("/")).exists():
                section.complain(_overlooked(what, extra))
    try:
        make_mesh(config.tensor_parallel)
    except ResourceError as error:
        section.complain(str(error))
    return section


def _overlooked(what: str, extra: str) -> str:
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen:
        return f"this machine has {what}, but JAX_PLATFORMS={chosen} keeps JAX from it; unset it"
    return f"this machine has {what}, but JAX uses the processor; pip install 'jaxserve[{extra}]'"


def look_at_model(config: EngineConfig) -> Section:
    """What the settings resolve to with this model."""
    from checkpoints.model_table import pullable_models
    from checkpoints.pull import pulled_file

    section = Section(title=f"model {config.model}")
    named = config.model in pullable_models()
    if named and pulled_file(config.model, cache_folder()) is None:
        section.say("files", f"not here yet; `jaxserve pull {config.model}` or the first use")
        return section
    try:
        _resolve(section, config)
    except USER_ERRORS as error:
        section.complain(str(error))
    except RuntimeError as error:  # no device: said above
        section.say("unknown", error)
    return section


def _resolve(section: Section, config: EngineConfig) -> None:
    import jax

    from checkpoints.open import open_checkpoint
    from checkpoints.resolve import resolve_model
    from jaxserve.engine.buckets import make_buckets
    from jaxserve.engine.build import (
        choose_attention,
        choose_context,
        choose_dtype,
        choose_page_dtype,
        choose_sampling,
        resolve_kernels,
    )
    from jaxserve.engine.quantize_choice import choose_quantization, describe
    from jaxserve.models.loading import parameter_infos
    from jaxserve.models.registry import read_model_config
    from jaxserve.parallel.mesh import check_divisible, make_mesh

    path = resolve_model(config.model, cache_folder(), pull_missing=False)
    section.say("files", path)
    reader = open_checkpoint(path)
    model = read_model_config(reader)
    section.say(
        "shape",
        f"{model.family}, {model.num_layers} layers, width {model.hidden_size}, {model.num_heads} "
        f"heads over {model.num_kv_heads} KV heads of {model.head_size}, {model.vocab_size} tokens",
    )
    device = jax.devices()[0]
    dtype = choose_dtype(config, device.platform)
    mesh = make_mesh(config.tensor_parallel)
    check_divisible(model, mesh)
    kernels = resolve_kernels(config)
    quantization = choose_quantization(config, model, reader, mesh, dtype, kernels)
    page_dtype = choose_page_dtype(config, dtype, quantization)
    section.say("dtype", f"{dtype.name}, KV pages {page_dtype.name}")
    section.say("weights as", describe(quantization, dtype))
    attention = choose_attention(config, model, dtype, page_dtype, device.platform)
    sampling = choose_sampling(config, model, device.platform)
    section.say("kernels", f"{attention}; {sampling}")
    longest, pages_per_sequence = choose_context(config, model)
    section.say("max_model_len", f"{longest} (the model's own limit: {model.max_position})")
    buckets = make_buckets(config.max_num_batched_tokens, config.max_step_rows)
    section.say("step sizes", ", ".join(str(bucket.tokens) for bucket in buckets) + " tokens")
    parameters = parameter_infos(model, dtype, quantization).values()
    weights = sum(math.prod(info.shape) * info.dtype.itemsize for info in parameters)
    weights //= config.tensor_parallel
    _plan(section, config, model, device, page_dtype, weights, attention, pages_per_sequence)


def _plan(
    section: Section,
    config: EngineConfig,
    model: ModelConfig,
    device: jax.Device,
    page_dtype: np.dtype,
    weights: int,
    attention: Choice,
    pages_per_sequence: int,
) -> None:
    """Where the memory goes; weights: bytes on each device."""
    from jaxserve.engine.memory import NO_OVERHEAD, free_bytes, page_bytes, plan_pages

    free = free_bytes(device)
    on_cpu = device.platform == "cpu"
    memory = plan_pages(
        config,
        page=page_bytes(model, config.page_size, page_dtype, config.tensor_parallel, attention),
        weights=weights,
        overhead=NO_OVERHEAD,
        pages_per_sequence=pages_per_sequence,
        free=free - weights,
        on_cpu=on_cpu,
    )
    section.say("weights", f"{megabytes(weights)} on each device")
    rest = "" if on_cpu else ", less what a step needs besides, which only compiling tells"
    section.say(
        "KV pool",
        f"{memory.num_pages} pages, {megabytes(memory.pool)}, "
        f"{(memory.num_pages - 1) * config.page_size} tokens (limit: {memory.limited_by}){rest}",
    )
    if weights + memory.pool > free:
        section.complain(
            f"weights and KV pool need {megabytes(weights + memory.pool)}, {megabytes(free)} are "
            "free; choose a smaller model or a smaller --kv-memory-bytes"
        )
