"""Makes a plan: whether the shapes can fit, the compiled step, and the arithmetic (before step 1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from jaxserve.engine.memory import ACCELERATOR_MARGIN, Overhead
from jaxserve.errors import ResourceError
from jaxserve.plan.bound import decode_work, step_bound
from jaxserve.plan.collectives import add_traffic, sent_bytes
from jaxserve.plan.fit import Need, fill_memory, valid_splits, weight_bytes
from jaxserve.plan.job import Job, read_weights, resolve, target_devices
from jaxserve.plan.measure import MeasuredStep, measure_step
from jaxserve.plan.messages import Capacity, Compiled, DeviceMemory, Plan, PlanRequest

Say = Callable[[str], None]
#: float32 arrays [rows, V] that logits and sampling take at once; only for slices that are not
#: compiled, by what sampling took where it was.
_VOCABULARY_ARRAYS = 8
_GIBIBYTE = 2**30


def make_plan(request: PlanRequest, cache: Path, say: Say) -> Plan:
    """The whole plan. Raises JaxserveError, CheckpointError or KernelError; one line each.

    cache: where pulled models are. say: gets what is being done.
    """
    job = resolve(request, cache)
    _refuse_what_cannot_fit(job)
    say("; ".join(job.kernels.values()))
    step = _compile(job, exact=request.exact, say=say)
    overhead = step.overhead
    filled = fill_memory(
        job.config,
        usable=job.usable,
        weights=step.largest.arguments - step.pool_bytes,
        overhead=overhead,
        page_bytes=job.page_bytes(job.split),
        pages_per_sequence=job.pages_per_sequence,
    )
    if filled is None or filled[1].users == 0:
        raise ResourceError(
            f"{job.config.model} does not fit {job.where}: beside weights "
            f"({job.weights / _GIBIBYTE:.1f} GiB) and what a step needs "
            f"({overhead.total / _GIBIBYTE:.1f} GiB) the {job.usable / _GIBIBYTE:.2f} GiB of a "
            f"device hold no sequence of {job.context:,} tokens; {_way_out(job, overhead)}"
        )
    return _put_together(job, step, overhead, *filled)


def _refuse_what_cannot_fit(job: Job) -> None:
    """Raises ResourceError where weights and sampling state alone are too much: nothing to compile."""
    state = job.state_bytes()
    if (job.usable - job.weights) * (1 - ACCELERATOR_MARGIN) > state:
        return
    rows = min(job.config.max_num_seqs, job.config.max_num_batched_tokens)
    arrays = _VOCABULARY_ARRAYS * rows * job.model.vocab_size * 4
    overhead = Overhead(state=state, programs=0, temporaries=arrays)
    raise ResourceError(
        f"{job.config.model} does not fit {job.where}: its weights take "
        f"{job.weights / _GIBIBYTE:.1f} GiB on each of {job.split} devices, of which programs may "
        f"use {job.usable / _GIBIBYTE:.2f} GiB; {_way_out(job, overhead)}"
    )


def _need(job: Job, overhead: Overhead) -> Need:
    return Need(
        config=job.config,
        model=job.model,
        parameters=job.parameters,
        overhead=overhead,
        page_bytes=job.page_bytes,
        pages_per_sequence=job.pages_per_sequence,
    )


def _way_out(job: Job, overhead: Overhead) -> str:
    """The nearest slice that holds all users, in words; of other chips where this kind has none."""
    need, users, kind = _need(job, overhead), job.config.max_num_seqs, job.where.kind
    who = f"{users} users of {job.context:,} tokens"
    found = need.smallest(kind, users)
    if found is not None:
        return f"by its shapes, {found} holds it with {who}"
    most = max(valid_splits(job.model))
    least = weight_bytes(job.parameters, most) / _GIBIBYTE
    others = ", ".join(str(each) for each in need.elsewhere(kind, users))
    return (
        f"no {kind} holds it with {who}, for it splits over at most {most} devices, {least:.1f} GiB "
        f"of weights on each" + (f"; by its shapes, {others} would" if others else "")
    )


def _compile(job: Job, *, exact: bool, say: Say) -> MeasuredStep:
    wanted = job.config.max_num_seqs * job.pages_per_sequence + 1
    room = (job.usable - job.weights) // 2 // job.page_bytes(job.split)
    try:
        return measure_step(
            job.config,
            job.model,
            target_devices(job.where),
            job.where.chip.platform,
            num_pages=max(8, min(wanted, room)),
            exact=exact,
            say=say,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ResourceError(
            f"{job.config.model} does not fit {job.where}: the compiler says {reason}"
        ) from None


def _put_together(
    job: Job, step: MeasuredStep, overhead: Overhead, memory: DeviceMemory, capacity: Capacity
) -> Plan:
    chip, config = job.where.chip, job.config
    users = min(step.rows, capacity.users)
    collectives = add_traffic((step.decode.collectives, step.sample.collectives))
    work = decode_work(
        job.model,
        read_weights(job),
        users=users,
        context=job.context,
        tensor_parallel=job.split,
        kv_token_bytes=capacity.page_bytes // (config.page_size * job.model.num_layers),
        sent_bytes=sent_bytes(
            collectives, job.num_chips, reduces_in_network=chip.reduces_in_network
        ),
    )
    fits_at = _need(job, overhead).smallest(job.where.kind, config.max_num_seqs)
    return Plan(
        model=config.model,
        source=job.source,
        num_parameters=job.num_parameters,
        topology=str(job.where),
        num_devices=job.split,
        num_chips=job.num_chips,
        dtype=job.dtype,
        weight_form=job.weight_form,
        product_dtype=job.product_dtype,
        page_dtype=job.page_dtype,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        context=job.context,
        page_size=config.page_size,
        kernels=job.kernels,
        memory=memory,
        capacity=capacity,
        collectives=collectives,
        users=users,
        work=work,
        bound=step_bound(work, chip, job.product_dtype),
        compiled=Compiled(
            depths=step.depths,
            num_layers=job.model.num_layers,
            num_programs=step.num_programs,
            num_served=step.num_served,
            in_place=step.largest.aliased >= step.pool_bytes,
            seconds=step.seconds,
        ),
        fits_at=None if fits_at is None else str(fits_at),
    )
