"""The line to an engine for tests of the application alone: answers at once, in this process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fake_engine import Job, fake_facts

from jaxserve.client import EndListener, Submission
from jaxserve.messages import EngineInfo, Output
from jaxserve.request import GenerationRequest


class FakeClient:
    """Stands in for `jaxserve.client.EngineClient`; keeps what it was asked in `requests`."""

    def __init__(self, *, max_model_len: int = 600) -> None:
        self.info: EngineInfo | None = EngineInfo(
            "fake", 260, max_model_len, 20, 16, 4096, embeddings="mean", prompt_logprobs=True
        )
        self.num_running = self.num_waiting = 0
        self.requests: list[GenerationRequest] = []

    def not_ready_reason(self) -> str | None:
        return None

    def submit(
        self, requests: Sequence[GenerationRequest], listener: EndListener | None = None
    ) -> Submission:
        self.requests += requests
        submission = Submission(lambda message: None, lambda rid: None)
        for rid in range(len(requests)):
            submission.track(rid)
        for rid, request in enumerate(requests):
            submission.deliver(rid, Output(rid, []))
            job = Job.of(request, 0)
            finished = False
            while not finished:
                output = job.step()
                finished = output.finish_reason is not None
                if finished:
                    facts = fake_facts(job, output.finish_reason)
                    output = msgspec.structs.replace(output, facts=facts)
                submission.deliver(rid, output)
            if listener is not None:
                listener.ended(rid, output)
        return submission

    def metrics(self) -> str:
        return ""

    def fail_all(self, reason: str) -> None:
        raise AssertionError(reason)
