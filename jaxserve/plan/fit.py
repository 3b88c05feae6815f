"""Whether a model fits the devices of a slice, and which slice would do (before step 1)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.memory import ACCELERATOR_MARGIN, Overhead, plan_pages
from jaxserve.errors import ResourceError, UsageError
from jaxserve.models.loading import ParameterInfo
from jaxserve.parallel.mesh import LOGICAL_RULES, TENSOR_AXIS
from jaxserve.plan.chips import Slice, known_chips, slices_of
from jaxserve.plan.messages import Capacity, DeviceMemory

#: More sequences than any pool holds, so that the engine's plan is bounded by memory alone.
_NO_LIMIT = 10**9


def valid_splits(model: ModelConfig) -> list[int]:
    """Over how many devices the model can be split."""
    common = math.gcd(model.num_kv_heads, model.num_heads, model.ffn_size)
    return [size for size in range(1, common + 1) if common % size == 0]


def check_split(model: ModelConfig, where: Slice, split: int, *, all_devices: bool) -> None:
    """Raises UsageError when the model cannot be split so, or the slice has too few devices.

    all_devices: --tensor-parallel was not given; split is all that the slice has.
    """
    if split > where.num_devices:
        raise UsageError(
            f"--tensor-parallel is {split}, but {where} has {where.num_devices} devices"
        )
    splits = valid_splits(model)
    if split in splits:
        return
    names = ", ".join(str(size) for size in splits if size <= where.num_devices)
    what = (
        f"the {split} devices of {where} do not divide"
        if all_devices
        else f"--tensor-parallel {split} does not divide"
    )
    raise UsageError(
        f"{what} the model ({model.num_heads} heads over {model.num_kv_heads} KV heads, "
        f"feed-forward width {model.ffn_size}); give --tensor-parallel {names}"
    )


def weight_bytes(parameters: Mapping[str, ParameterInfo], split: int) -> int:
    """Of one device's share of all parameters; what does not divide it holds whole."""
    return sum(_share(info, split) * info.dtype.itemsize for info in parameters.values())


def _share(info: ParameterInfo, split: int) -> int:
    elements = math.prod(info.shape)
    for axis, size in zip(info.logical_axes, info.shape, strict=True):
        if axis is not None and LOGICAL_RULES[axis] == TENSOR_AXIS and size % split == 0:
            return elements // split
    return elements


def matrix_elements(parameters: Mapping[str, ParameterInfo], split: int) -> int:
    """Elements of one device's share of the parameters that are matrices."""
    return sum(_share(info, split) for info in parameters.values() if len(info.shape) == 2)


def fill_memory(
    config: EngineConfig,
    *,
    usable: int,
    weights: int,
    overhead: Overhead,
    page_bytes: int,
    pages_per_sequence: int,
) -> tuple[DeviceMemory, Capacity] | None:
    """Where one device's memory goes and what the pool holds, as the engine plans it.

    None if not even one page fits.
    """
    free = usable - weights
    try:
        plan = plan_pages(
            dataclasses.replace(config, max_num_seqs=_NO_LIMIT),
            page=page_bytes,
            weights=weights,
            overhead=overhead,
            pages_per_sequence=pages_per_sequence,
            free=free,
            on_cpu=False,
        )
    except ResourceError:
        return None
    memory = DeviceMemory(
        usable=usable,
        weights=weights,
        state=overhead.state,
        programs=overhead.programs,
        temporaries=overhead.temporaries,
        margin=int(free * ACCELERATOR_MARGIN),
        pool=plan.pool,
    )
    usable_pages = plan.num_pages - 1  # page 0 is the trash page
    return memory, Capacity(
        num_pages=plan.num_pages,
        page_bytes=page_bytes,
        num_tokens=usable_pages * config.page_size,
        users=usable_pages // pages_per_sequence,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What has to fit: users of a context at once, beside a model and its overhead.

    page_bytes: of one page on one of so many devices.
    """

    config: EngineConfig
    model: ModelConfig
    parameters: Mapping[str, ParameterInfo]
    overhead: Overhead
    page_bytes: Callable[[int], int]
    pages_per_sequence: int

    def fits(self, where: Slice, users: int) -> bool:
        """Whether all devices of a slice together hold it."""
        split = where.num_devices
        if split not in valid_splits(self.model):
            return False
        filled = fill_memory(
            self.config,
            usable=where.chip.usable_hbm_bytes // where.chip.devices_per_chip,
            weights=weight_bytes(self.parameters, split),
            overhead=self.overhead,
            page_bytes=self.page_bytes(split),
            pages_per_sequence=self.pages_per_sequence,
        )
        return filled is not None and filled[1].users >= users

    def smallest(self, kind: str, users: int) -> Slice | None:
        """The smallest slice of a kind of chip that holds them."""
        return next((each for each in slices_of(kind) if self.fits(each, users)), None)

    def elsewhere(self, kind: str, users: int) -> list[Slice]:
        """The smallest slice of each other kind on the same platform, where there is one."""
        chips = known_chips()
        others = (
            self.smallest(name, users)
            for name, chip in chips.items()
            if name != kind and chip.platform == chips[kind].platform
        )
        return [found for found in others if found is not None]
