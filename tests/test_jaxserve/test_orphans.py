"""What a worker leaves open when it dies is told to the next one, with what it took."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

from counting_engine import make_engine, request

from jaxserve import messages
from jaxserve.engine.link import EngineLink, WorkerGone
from jaxserve.engine.loop import EngineLoop
from jaxserve.messages import EngineInfo


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.epoch = "now"
        self.inbox: Any = None
        self.sent: list[tuple[bytes, Any]] = []
        self.status = types.SimpleNamespace()

    def send(self, worker: bytes, message: Any) -> None:
        self.sent.append((worker, messages.decode_from_engine(messages.encode(message))))


def test_orphans_go_to_the_next_worker_and_an_abort_is_answered_with_its_facts() -> None:
    engine, _ = make_engine()
    link = Link()
    info = EngineInfo("m", 97, 100, 20, 4, 64)
    loop = EngineLoop(engine, cast_link(link), info, threading.Event())

    def submit(worker: bytes, rid: int) -> None:
        asked = dataclasses.replace(
            request(f"id-{rid}", [1, 2, 3], max_tokens=50, ignore_eos=True), tenant="alice"
        )
        loop._handle((worker, messages.Submit(rid, "now", asked)))

    submit(b"one", 7)
    submit(b"one", 8)
    for _ in range(5):
        loop._deliver(engine.step())
    loop._handle((b"one", WorkerGone()))
    assert engine.num_requests == 0
    link.sent.clear()
    submit(b"two", 1)
    (orphans,) = [message for _, message in link.sent if isinstance(message, messages.Orphans)]
    assert {orphan.request_id for orphan in orphans.orphans} == {"id-7", "id-8"}
    for orphan in orphans.orphans:
        assert (orphan.tenant, orphan.num_prompt_tokens) == ("alice", 3)
        assert orphan.facts is not None
        assert orphan.facts.num_generated_tokens >= 3
    for _ in range(3):
        loop._deliver(engine.step())
    link.sent.clear()
    for rid in (1, 99):
        loop._handle((b"two", messages.Abort([rid])))
    (first,), (unknown,) = (message.outputs for _, message in link.sent)
    assert (first.rid, first.finish_reason) == (1, "abort")
    assert first.facts is not None
    assert first.facts.num_generated_tokens >= 1
    assert (unknown.rid, unknown.facts) == (99, None), "who asks is always told"
    assert not loop._owner
    assert not loop._of_worker


def cast_link(link: Link) -> EngineLink:
    return link  # type: ignore[return-value]
