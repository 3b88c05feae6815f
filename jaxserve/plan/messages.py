"""What the command line and the child that compiles say to each other (before step 1). No jax.

The child gets one `PlanRequest` and answers with `Progress` lines, then one `Planned` or `Failed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.plan.bound import StepBound, StepWork
from jaxserve.plan.collectives import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """topology: as in "v6e:2x4". all_devices: tensor_parallel was not given, it is the slice's.

    config: how the engine would run; its max_model_len is the context. exact: compile every layer.
    """

    topology: str
    config: EngineConfig
    all_devices: bool
    exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Where the memory of one device goes, in bytes.

    usable: what programs may take of it. weights: as the compiler lays them out, with a step's
    inputs. state: of sampling. programs: code of all the engine's programs. temporaries: of the
    largest step, with the logits of two. margin: left alone. pool: what remains, in whole pages.
    """

    usable: int
    weights: int
    state: int
    programs: int
    temporaries: int
    margin: int
    pool: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the pool holds. users: sequences of the context that was asked for."""

    num_pages: int
    page_bytes: int
    num_tokens: int
    users: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What was compiled, and how that became the whole.

    depths: numbers of layers, the model's own or two smaller ones. num_programs: compiled here;
    num_served: those that an engine has. in_place: whether no step copies the pool.
    """

    depths: tuple[int, ...]
    num_layers: int
    num_programs: int
    num_served: int
    in_place: bool
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about one model on one slice; per device unless it says otherwise.

    source: where the model's shape is from. num_parameters: of the whole model. num_devices: over
    which the model is split; num_chips: that they are part of. dtype: of activations; weight_form:
    how weights are stored; product_dtype: at whose rate they are multiplied. users: in a step, and context: the
    tokens that each of them has. collectives: of one step, by kind. fits_at: the smallest slice of
    this chip that holds all users, by shapes and what was measured here; None if none does.
    """

    model: str
    source: str
    num_parameters: int
    topology: str
    num_devices: int
    num_chips: int
    dtype: str
    weight_form: str
    product_dtype: str
    page_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    context: int
    page_size: int
    kernels: Mapping[str, str]
    memory: DeviceMemory
    capacity: Capacity
    collectives: Mapping[str, Traffic]
    users: int
    work: StepWork
    bound: StepBound
    compiled: Compiled
    fits_at: str | None


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """What is being done."""

    text: str


class Planned(msgspec.Struct, tag="planned", frozen=True):
    """The end of it."""

    plan: Plan


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """One line for the user. is_usage: it is about the arguments."""

    text: str
    is_usage: bool


Message = Progress | Planned | Failed
