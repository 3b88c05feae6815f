"""A plan as text for people, and as JSON for programs (before step 1). No jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.plan.bound import operation_rate, price_per_million
from jaxserve.plan.chips import Chip, Slice
from jaxserve.plan.messages import Plan

_GIBIBYTE, _MEBIBYTE = 2**30, 2**20


def holds_all(plan: Plan) -> bool:
    """Whether the pool has room for every user at the full context."""
    return plan.capacity.users >= plan.max_num_seqs


def to_json(plan: Plan, where: Slice, price: float | None) -> dict[str, Any]:
    """Everything, with what follows from it and where the chip's numbers come from."""
    made: dict[str, Any] = msgspec.to_builtins(plan)
    made["bound"]["seconds"] = plan.bound.seconds
    made["bound"]["limited_by"] = plan.bound.limited_by
    made["bound"]["tokens_per_second_per_chip"] = _rate(plan)
    made["holds_all"] = holds_all(plan)
    if price is not None:
        made["price_per_chip_hour"] = price
        made["price_per_million_output_tokens_at_bound"] = _price(plan, price)
    made["chip"] = msgspec.to_builtins(where.chip)
    return made


def to_text(plan: Plan, where: Slice, price: float | None) -> str:
    """The report, in lines of about a hundred columns."""
    sections = (
        _head(plan, where),
        _memory(plan, where.chip),
        _pool(plan),
        _collectives(plan),
        _step(plan, where.chip),
        _money(plan, price),
        _sources(where.chip),
    )
    return "\n".join(line for section in sections for line in section)


def _head(plan: Plan, where: Slice) -> Iterator[str]:
    count = plan.num_parameters
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
    yield f"{plan.model} on {plan.topology}: {size} parameters ({plan.source})"
    weights = "" if plan.weight_form == plan.dtype else f"weights {plan.weight_form}, "
    split = "one device" if plan.num_devices == 1 else f"{plan.num_devices} devices"
    yield (
        f"  {plan.dtype}, {weights}KV pages {plan.page_dtype} of {plan.page_size} tokens; split over {split}; "
        f"{plan.max_num_seqs} sequences, {plan.max_num_batched_tokens} tokens a step"
    )
    if plan.num_chips < where.num_chips:
        yield f"  uses {plan.num_chips} of the slice's {where.num_chips} chips; the rest is free for others"
    for choice in plan.kernels.values():
        yield f"  {choice}"
    done = plan.compiled
    if done.depths == (done.num_layers,):
        how = f"all {done.num_layers} layers"
    else:
        small, large = done.depths
        how = (
            f"{small} and {large} layers, and from these what {done.num_layers} take "
            "(--exact compiles all)"
        )
    yield f"  compiled in {done.seconds:.0f} s: {done.num_programs} programs, with {how}"
    if not done.in_place:
        yield "  WARNING: a step of this program copies the KV pool"


def _memory(plan: Plan, chip: Chip) -> Iterator[str]:
    memory, done = plan.memory, plan.compiled
    programs = f"{done.num_served}; those not compiled here as the next larger"
    if memory.programs == 0:
        programs = "of unknown size: this compiler does not tell"
    yield ""
    unit = "chip" if chip.devices_per_chip == 1 else f"device (1/{chip.devices_per_chip} chip)"
    yield f"memory of each {unit}, in MiB"
    rows = (
        (
            "usable",
            memory.usable,
            f"of {chip.hbm_bytes / chip.devices_per_chip / _GIBIBYTE:.0f} GiB",
        ),
        ("weights", memory.weights, "as the compiler lays them out, with a step's inputs"),
        ("sampling state", memory.state, "counts and biases of every sequence"),
        ("programs", memory.programs, programs),
        ("temporaries", memory.temporaries, "of the largest step, and the logits of two"),
        ("left alone", memory.margin, "as the engine does"),
        ("KV pool", memory.pool, "what remains"),
    )
    for name, size, note in rows:
        yield f"  {name:<16}{size / _MEBIBYTE:>12,.1f}   {note}"


def _pool(plan: Plan) -> Iterator[str]:
    capacity = plan.capacity
    yield ""
    yield (
        f"KV pool: {capacity.num_pages:,} pages, {capacity.num_tokens:,} tokens, "
        f"{capacity.users:,} users of {plan.context:,} tokens each"
    )
    if not holds_all(plan):
        yield (
            f"  does not fit: {plan.max_num_seqs} such users at once"
            + (f"; {plan.fits_at} holds them" if plan.fits_at else f"; no {_kind(plan)} holds them")
        )


def _kind(plan: Plan) -> str:
    return plan.topology.partition(":")[0]


def _collectives(plan: Plan) -> Iterator[str]:
    yield ""
    if not plan.collectives:
        yield "collectives of a step: none"
        return
    yield f"collectives of a step of {plan.users} users"
    for kind, traffic in sorted(plan.collectives.items()):
        yield f"  {kind:<20}{traffic.count:>6}   {traffic.bytes / _MEBIBYTE:>10,.1f} MiB together"


def _step(plan: Plan, chip: Chip) -> Iterator[str]:
    bound, work = plan.bound, plan.work
    yield ""
    yield (
        f"a step that gives {plan.users} users of {plan.context:,} tokens one more takes AT LEAST "
        f"{bound.seconds * 1e3:.2f} ms"
    )
    yield (
        "  (a bound from bytes and operations at published rates, not a forecast; "
        f"{bound.limited_by} decides)"
    )
    share = chip.devices_per_chip
    memory_rate = chip.hbm_bytes_per_second / share
    compute_rate = operation_rate(chip, plan.product_dtype) / share
    yield (
        f"  memory      {bound.memory_seconds * 1e3:>8.2f} ms   {work.memory_bytes / 1e9:.2f} GB at "
        f"{memory_rate / 1e9:,.0f} GB/s: weights {work.weight_bytes / 1e9:.2f}, "
        f"KV {work.kv_bytes / 1e9:.2f}, logits {work.logits_bytes / 1e9:.2f}"
    )
    yield (
        f"  arithmetic  {bound.compute_seconds * 1e3:>8.2f} ms   {work.operations / 1e12:.3f} Tera-"
        f"operations at {compute_rate / 1e12:,.0f} a second"
    )
    yield (
        f"  links       {bound.link_seconds * 1e3:>8.2f} ms   {work.sent_bytes / 1e6:,.1f} MB sent by "
        f"each chip at {chip.link_bytes_per_second / 1e9:,.0f} GB/s, without latencies"
    )
    yield (
        f"  at most {plan.users / bound.seconds:,.0f} output tokens a second, "
        f"{_rate(plan):,.0f} per chip, prompts not counted"
    )


def _rate(plan: Plan) -> float:
    """Output tokens per second and chip, at the bound."""
    return plan.users / plan.bound.seconds / plan.num_chips


def _money(plan: Plan, price: float | None) -> Iterator[str]:
    if price is not None:
        yield (
            f"  at {price:g} per chip-hour a million output tokens cost AT LEAST "
            f"{_price(plan, price):.3f} (at the bound, every sequence busy)"
        )


def _price(plan: Plan, price: float) -> float:
    return price_per_million(
        plan.bound.seconds,
        users=plan.users,
        num_chips=plan.num_chips,
        price_per_chip_hour=price,
    )


def _sources(chip: Chip) -> Iterator[str]:
    yield ""
    yield "where the chip's numbers come from"
    for name, source in chip.sources.items():
        yield f"  {name:<22}{source}"
