"""Takes requests to the engine within their tenant's limits, and has each of them measured.

Beside steps 3 to 9. The one way from a route to `EngineClient.submit`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import flask

from jaxserve.client import EngineClient, Submission
from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError
from jaxserve.messages import Orphan
from jaxserve.request import GenerationRequest
from server.access.gate import current_caller
from server.access.limits import LimitBook
from server.trace.otlp import OtlpExporter
from server.usage.ledger import Ledger, UsageRow
from server.usage.measured import Measured
from server.usage.prices import Prices

EXTENSION = "jaxserve.meter"
#: Tokens of an answer that are reckoned with where the request does not bound it.
EXPECTED_ANSWER = 256


class Meter:
    """One per worker."""

    def __init__(
        self,
        ledger: Ledger,
        limits: LimitBook,
        prices: Prices,
        model_name: Callable[[], str],
        exporter: OtlpExporter | None = None,
    ) -> None:
        self.ledger = ledger
        self.exporter = exporter
        self._limits = limits
        self._prices = prices
        self._model_name = model_name
        self._open: set[Measured] = set()

    def submit(
        self,
        client: EngineClient,
        requests: Sequence[GenerationRequest],
        *,
        answers_per_prompt: int = 1,
        max_tokens: int | None = None,
    ) -> Submission:
        """Submits what the current HTTP request asks of the engine.

        requests: the answers to a prompt side by side. max_tokens: of each answer, if it was given.
        Raises LimitError, RequestError, EngineGoneError.
        """
        caller = current_caller()
        if caller.name and not caller.tenant.admin and any(each.priority < 0 for each in requests):
            raise RequestError("priority below 0 needs an admin's key", param="priority")
        measured = self._measured(requests, answers_per_prompt, max_tokens)
        asked = [
            dataclasses.replace(
                request,
                tenant=caller.name,
                weight=caller.tenant.weight,
                cache_salt=_salt(caller.name, request.cache_salt),
                trace=self.ledger.max_traces > 0 or self.exporter is not None,
            )
            for request in requests
        ]
        part = measured.add([len(each.prompt_ids) for each in asked], answers_per_prompt)
        try:
            return client.submit(asked, part)
        except BaseException:
            part.never_sent()
            raise

    def answered(self, response: flask.Response) -> flask.Response:
        """For every response: what is left of the limits, and the moment when it has been sent."""
        measured: Measured | None = flask.g.get("measured")
        if measured is not None:
            response.headers.update(measured.headers)
            measured.status = response.status_code
            if response.is_streamed:
                response.call_on_close(measured.sent)
            else:
                measured.num_bytes = response.content_length or 0
                measured.sent()
        return response

    def adopt(self, orphans: Sequence[Orphan]) -> None:
        """Writes down what a worker that died left open; a row for each answer."""
        now = time.time()
        for orphan in orphans:
            facts = orphan.facts
            generated = 0 if facts is None else facts.num_generated_tokens
            cached = 0 if facts is None else facts.num_cached_tokens
            seconds = 0.0 if facts is None else facts.device_seconds
            price = self._prices.cost(
                prompt=orphan.num_prompt_tokens,
                cached=cached,
                generated=generated,
                device_seconds=seconds,
            )
            self.ledger.add(
                UsageRow(
                    ended=now,
                    day=time.strftime("%Y-%m-%d", time.gmtime(now)),
                    request_id=orphan.request_id.rpartition("-")[0],
                    tenant=orphan.tenant,
                    model=self._model_name(),
                    route="",
                    answers=1,
                    prompt_tokens=orphan.num_prompt_tokens,
                    cached_tokens=cached,
                    generated_tokens=generated,
                    queue_seconds=0.0 if facts is None else facts.queue_seconds,
                    device_seconds=seconds,
                    finish_reason="abort",
                    price=price,
                )
            )

    def write_last(self) -> None:
        """At the end of this process: what is still open is written down as it stands."""
        for measured in list(self._open):
            measured.give_up()
        self._limits.close()
        self.ledger.write_last()

    def _over(self, measured: Measured) -> None:
        self._open.discard(measured)
        if self.exporter is not None:
            self.exporter.add(measured.trace, measured.context)

    def _measured(
        self,
        requests: Sequence[GenerationRequest],
        answers_per_prompt: int,
        max_tokens: int | None,
    ) -> Measured:
        """The current HTTP request's, which may ask more than once."""
        measured: Measured | None = flask.g.get("measured")
        if measured is None:
            caller = current_caller()
            prompt = sum(len(each.prompt_ids) for each in requests[::answers_per_prompt])
            answer = EXPECTED_ANSWER if max_tokens is None else max_tokens
            generated = answer * len(requests)
            cost = self._prices.cost(
                prompt=prompt, cached=0, generated=generated, device_seconds=0.0
            )
            admission = self._limits.admit(caller.name, caller.tenant, prompt + generated, cost)
            measured = Measured(self.ledger, self._limits, self._prices, admission, self._over)
            measured.model = self._model_name()
            self._open.add(measured)
            flask.g.measured = measured
        return measured


def _salt(tenant: str, salt: str) -> str:
    """Tenants share no cached prefixes, or one could find out what another has asked."""
    return f"{tenant}\0{salt}" if tenant else salt


def current_measured() -> Measured:
    """What is noted of the current HTTP request, which has asked the engine."""
    measured: Measured = flask.g.measured
    return measured


def make_meter(config: ServerConfig, model_name: Callable[[], str]) -> Meter:
    """A worker's, with what it keeps in the server's data folder."""
    folder = config.data_folder
    return Meter(
        Ledger(folder, rows=config.usage_ledger, traces=config.trace_requests),
        LimitBook(folder),
        Prices.of(config),
        model_name,
        None if config.otlp_endpoint is None else OtlpExporter(config.otlp_endpoint),
    )
