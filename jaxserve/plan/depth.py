"""From the programs of two small depths to that of a whole model (before step 1). No jax.

Layers are unrolled and each costs the compiler seconds; yet layers of a kind are equal. Arguments,
outputs and collectives grow by the same with each, which is exact. Code and temporaries are
estimated, rather too high: compilers share the code of equal layers once there are enough of
them, and keep the first few layers' temporaries on the chip. (All 32 layers of Llama-3.1-8B on
v6e:2x4 took 682 MiB of programs and 507 of temporaries; from 4 and 8 layers, 676 and 507.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.config import LayerConfig
from jaxserve.plan.collectives import Traffic

#: The smaller depth has at least so many layers: the first few hide in the TPU's own memory.
SMALL_DEPTH = 4
#: Temporaries are taken to grow by so many times what the two depths show: for Llama-3.1-8B on
#: v6e:2x4 they were 4.7, 8.5 and 23.4 MiB in 4, 8 and 16 layers.
CAUTION = 2
#: Layers repeat after so many at most, or all are compiled.
LONGEST_PERIOD = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSize:
    """What the compiler says of one program on one device, in bytes. aliased: donated arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    collectives: Mapping[str, Traffic]


def choose_depths(layers: Sequence[LayerConfig], *, exact: bool) -> tuple[int, ...]:
    """The numbers of layers to compile: the model's own, or two from which it follows.

    Where kinds of layers alternate, both hold whole rounds of them.
    """
    period = _period(layers)
    small = -(-SMALL_DEPTH // period) * period
    if exact or period > LONGEST_PERIOD or len(layers) <= 2 * small:
        return (len(layers),)
    return small, 2 * small


def _period(layers: Sequence[LayerConfig]) -> int:
    return next(
        period
        for period in range(1, len(layers) + 1)
        if all(layer == layers[index % period] for index, layer in enumerate(layers))
    )


def at_depth(sizes: Mapping[int, ProgramSize], num_layers: int) -> ProgramSize:
    """The program with so many layers, from those of one depth (the same) or of two."""
    if num_layers in sizes:
        return sizes[num_layers]
    (small, first), (large, second) = sorted(sizes.items())
    growth = (second.temporaries - first.temporaries) / (large - small)

    def line(low: float, high: float) -> int:
        return round(low + (high - low) * (num_layers - small) / (large - small))

    return ProgramSize(
        arguments=line(first.arguments, second.arguments),
        outputs=line(first.outputs, second.outputs),
        aliased=line(first.aliased, second.aliased),
        temporaries=second.temporaries + round(CAUTION * max(0.0, growth) * (num_layers - large)),
        code=max(line(first.code, second.code), round(second.code * num_layers / large)),
        collectives={
            kind: Traffic(
                count=line(_of(first, kind).count, more.count),
                bytes=line(_of(first, kind).bytes, more.bytes),
            )
            for kind, more in second.collectives.items()
        },
    )


def _of(size: ProgramSize, kind: str) -> Traffic:
    return size.collectives.get(kind, Traffic(count=0, bytes=0))
