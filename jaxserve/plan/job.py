"""A request for a plan with what it resolves to: model, slice, and an engine's choices (before step 1)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import (
    choose_attention,
    choose_context,
    choose_dtype,
    choose_page_dtype,
    choose_sampling,
    resolve_kernels,
)
from jaxserve.engine.memory import page_bytes
from jaxserve.engine.quantize_choice import describe, named_quantization
from jaxserve.errors import UsageError
from jaxserve.models.loading import ParameterInfo, parameter_infos
from jaxserve.parallel.mesh import make_abstract_mesh
from jaxserve.plan.bound import ReadWeights
from jaxserve.plan.chips import Slice, parse_topology
from jaxserve.plan.fit import check_split, matrix_elements, weight_bytes
from jaxserve.plan.messages import PlanRequest
from jaxserve.plan.shapes import read_shape
from jaxserve.quantization.weights import Quantization
from jaxserve.sampling.limits import SamplingLimits
from jaxserve.sampling.state import make_state
from pallas_kernels import gpu_targets, tpu_targets
from pallas_kernels.dispatch import Choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One model on one slice.

    parameters: as they are stored, and plain_parameters: before they were quantised, the same where
    they are not. dtype: of activations, and of plain weights; weight_form: how weights are stored,
    in words; product_dtype: at whose rate they are multiplied; page_dtype: of KV pages.
    """

    config: EngineConfig
    model: ModelConfig
    source: str
    where: Slice
    parameters: Mapping[str, ParameterInfo]
    plain_parameters: Mapping[str, ParameterInfo]
    attention: Choice
    sampling: Choice
    products: str | None
    dtype: str
    weight_form: str
    product_dtype: str
    page_dtype: str
    context: int
    pages_per_sequence: int

    @property
    def split(self) -> int:
        """Over how many devices the model is split."""
        return self.config.tensor_parallel

    @property
    def num_chips(self) -> int:
        """Chips that these devices are part of."""
        return -(-self.split // self.where.chip.devices_per_chip)

    @property
    def usable(self) -> int:
        """Bytes that programs may take of one device."""
        return self.where.chip.usable_hbm_bytes // self.where.chip.devices_per_chip

    @property
    def weights(self) -> int:
        """Bytes of one device's share, by shapes."""
        return weight_bytes(self.parameters, self.split)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(math.prod(info.shape) for info in self.plain_parameters.values())

    @property
    def kernels(self) -> dict[str, str]:
        """What each op got, and why not another."""
        made = {choice.op: str(choice) for choice in (self.attention, self.sampling)}
        if self.products is not None:
            made["quantized_matmul"] = f"quantized_matmul: {self.products}"
        return made

    def page_bytes(self, split: int) -> int:
        """Of one page of all layers, on one of `split` devices."""
        return page_bytes(self.model, self.config.page_size, self.page_dtype, split, self.attention)

    def state_bytes(self) -> int:
        """Of the sampling state, by shapes; every device has it whole."""
        make = functools.partial(
            make_state, self.config.max_num_seqs, self.model.vocab_size, SamplingLimits()
        )
        leaves = jax.tree.leaves(jax.eval_shape(make))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def resolve(request: PlanRequest, cache: Path) -> Job:
    """Reads the model's shape and makes every choice that an engine would make."""
    where = parse_topology(request.topology)
    config = request.config
    model, source = read_shape(config.model, cache)
    context = config.max_model_len
    assert context is not None, config
    if context > model.max_position:
        raise UsageError(
            f"--context is {context}, but the model was made for {model.max_position} tokens"
        )
    check_split(model, where, config.tensor_parallel, all_devices=request.all_devices)
    platform = where.chip.platform
    dtype = choose_dtype(config, platform)
    page_dtype = choose_page_dtype(config, dtype, None)  # auto never quantises here
    plain = parameter_infos(model, dtype)
    quantization = named_quantization(
        config,
        model,
        make_abstract_mesh(config.tensor_parallel),
        platform,
        dtype,
        resolve_kernels(config),
        fast_only=True,
    )
    return Job(
        config=config,
        model=model,
        source=source,
        where=where,
        parameters=parameter_infos(model, dtype, quantization) if quantization else plain,
        plain_parameters=plain,
        attention=choose_attention(config, model, dtype, page_dtype, platform),
        sampling=choose_sampling(config, model, platform),
        products=quantization.layers.implementation if quantization else None,
        dtype=dtype.name,
        weight_form=describe(quantization, dtype),
        product_dtype=_product_dtype(quantization, dtype),
        page_dtype=page_dtype.name,
        context=context,
        pages_per_sequence=choose_context(config, model)[1],
    )


def _product_dtype(quantization: Quantization | None, dtype: np.dtype) -> str:
    """At which dtype's rate weights can be multiplied: that of activations as they are rounded."""
    activations = "float" if quantization is None else quantization.layers.scheme.activations
    if activations.startswith("int8"):
        return "int8"
    return "float8" if activations.startswith("fp8") else dtype.name


def target_devices(where: Slice) -> Sequence[jax.Device]:
    """Stand-ins for a slice's devices. Raises KernelError where the compiler is missing."""
    name = where.chip.compiler_name
    if where.chip.platform == "tpu":
        return tuple(tpu_targets.tpu_topology(f"{name}:{where.topology}").devices)
    return tuple(gpu_targets.gpu_topology(name, where.num_devices).devices)


def read_weights(job: Job) -> ReadWeights:
    """What every step reads whole: all but an embedding that is not the output head, too."""

    def read(parameters: Mapping[str, ParameterInfo]) -> dict[str, ParameterInfo]:
        return {
            path: info
            for path, info in parameters.items()
            if job.model.tie_embeddings or not path.startswith("embed.")
        }

    return ReadWeights(
        num_bytes=weight_bytes(read(job.parameters), job.split),
        matrix_elements=matrix_elements(read(job.plain_parameters), job.split),
    )
