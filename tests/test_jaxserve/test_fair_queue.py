"""Turns of tenants: a flood delays nobody, weights divide, and one tenant is served in order."""

from __future__ import annotations

import dataclasses

from counting_engine import make_engine
from counting_engine import request as counting_request
from test_scheduler import make_scheduler, read, run

from jaxserve.engine.fair_queue import FairQueue, keep_turns
from jaxserve.engine.sequence import Sequence
from jaxserve.errors import RefusedError
from jaxserve.request import GenerationRequest, SamplingParams


def make(order: int, tenant: str, prompt: list[int], weight: float = 1.0) -> Sequence:
    request = GenerationRequest(
        request_id=str(order),
        prompt_ids=prompt,
        sampling=SamplingParams(),
        tenant=tenant,
        weight=weight,
    )
    return Sequence.from_request(request, max_tokens=2, order=order)


def test_the_line_of_virtual_time_by_hand() -> None:
    queue = FairQueue()
    assert [queue.start("a", 10, 1.0) for _ in range(3)] == [0, 10, 20]
    queue.admitted(0)
    queue.admitted(10)
    assert queue.start("b", 30, 2.0) == 10  # now, not at the end of what a has waiting
    assert queue.start("b", 30, 2.0) == 25
    queue.settle("b", -20, 2.0)  # took fewer than was reckoned with
    assert queue.start("b", 30, 2.0) == 30
    queue.settle("b", -1000, 2.0)
    assert queue.start("b", 30, 2.0) == 30, "never before its own earlier requests"
    queue.admitted(500)
    assert queue.start("a", 1, 1.0) == 500, "who was away has saved nothing up"


def test_after_a_flood_of_one_tenant_another_ones_request_starts_next() -> None:
    """A thousand wait, all of one cached prompt, which would let them go ahead of others."""
    scheduler = make_scheduler(num_pages=64, slots=2, tokens=16)
    prompt = list(range(12))
    for order in range(1000):
        scheduler.add(make(order, "a", prompt))
    started: list[str] = []
    plans = []
    for turn in range(60):
        if turn == 20:
            before = len(started)
            for order in range(1000, 1005):
                scheduler.add(make(order, "b", [order] * 9))
        plan = scheduler.schedule()
        started += [sequence.request.tenant for sequence in plan.admitted]
        plans.append(plan)
        read(scheduler, plans.pop(0))
        scheduler.check_integrity()
    assert started[before] == "b"
    since = started[before : before + 10]
    assert since.count("b") == 5, f"they take turns from then on: {since}"
    assert "a" in since[:3]


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    scheduler = make_scheduler(num_pages=64, slots=1, prefix_caching=False)
    for order in range(60):
        scheduler.add(make(order, "a", [order] * 6))
        scheduler.add(make(100 + order, "b", [order] * 6, weight=2.0))
    started: list[str] = []
    while len(started) < 60:
        plan = scheduler.schedule()
        started += [sequence.request.tenant for sequence in plan.admitted]
        read(scheduler, plan)
    assert 38 <= started.count("b") <= 42


def test_one_tenant_alone_is_served_in_the_order_of_arrival() -> None:
    scheduler = make_scheduler(num_pages=24, slots=3, prefix_caching=False)
    sequences = [make(order, "a", [order] * (1 + 5 * (order % 3))) for order in range(40)]
    plans = run(scheduler, sequences)
    admitted = [sequence.order for plan in plans for sequence in plan.admitted]
    assert admitted == sorted(admitted)


def test_what_goes_ahead_passes_its_own_tenant_only() -> None:
    found = ["a1", "b1", "a2", "a3", "b2"]
    preferred = ["a3", "b2", "a1", "b1", "a2"]
    assert list(keep_turns(found, preferred, lambda item: item[0])) == [
        "a3",
        "b2",
        "a1",
        "a2",
        "b1",
    ]


def test_a_flood_leaves_room_in_the_queue_for_others() -> None:
    reasons = set()

    def taken(tenant: str, count: int) -> int:
        accepted = 0
        for number in range(count):
            asked = counting_request(f"{tenant}{number}", [1, 2], max_tokens=2)
            try:
                engine.add(dataclasses.replace(asked, tenant=tenant))
                accepted += 1
            except RefusedError as error:
                reasons.add(error.reason)
        return accepted

    engine, _ = make_engine(max_queue_len=16)
    assert taken("a", 100) == 8
    assert taken("b", 100) == 4
    assert taken("c", 1) == 1
    assert reasons == {"tenant_queue_full"}
    engine, _ = make_engine(max_queue_len=16)
    assert taken("", 100) == 16, "without keys there is one tenant, which may have all of it"
