"""Traces as OpenTelemetry spans, sent to a collector as OTLP over HTTP in JSON.

Needs no library of OpenTelemetry's: the format is a stable one, and all that is wanted of it is
written here. A collector that is slow or gone costs no request anything; what it did not take is
dropped, and the log says so once a minute.
"""

from __future__ import annotations

import collections
import dataclasses
import http.client
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import msgspec

logger = logging.getLogger("jaxserve.server")

#: Traces that wait for the collector; older ones are dropped then.
MAX_WAITING = 2000
_SEND_SECONDS = 1.0
_TIMEOUT_SECONDS = 5.0
_BATCH = 200
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SPAN_KIND_INTERNAL, _SPAN_KIND_SERVER = 1, 2
_STATUS_ERROR = 2

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SpanContext:
    """Where a request's spans belong. parent: the caller's span, "" for a trace of our own."""

    trace_id: str
    parent: str
    sampled: bool


def read_traceparent(header: str) -> SpanContext:
    """W3C's `traceparent`; one that is missing or broken begins a new trace, as W3C demands."""
    found = _PARENT.fullmatch(header.strip())
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return SpanContext(os.urandom(16).hex(), "", True)
    return SpanContext(found[1], found[2], bool(int(found[3], 16) & 1))


class OtlpExporter:
    """Sends traces to `endpoint`, a URL such as http://127.0.0.1:4318/v1/traces."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._waiting: collections.deque[tuple[Callable[[], Json], SpanContext]] = (
            collections.deque(maxlen=MAX_WAITING)
        )
        self._sender: gevent.Greenlet | None = None
        self._complained = float("-inf")

    def add(self, make_trace: Callable[[], Json], context: SpanContext) -> None:
        """A trace to be made and sent soon. Never waits, never fails."""
        if not context.sampled:
            return
        self._waiting.append((make_trace, context))
        if self._sender is None:
            self._sender = gevent.spawn(self._send_on)

    def _send_on(self) -> None:
        try:
            while self._waiting:
                gevent.sleep(_SEND_SECONDS)
                self.flush()
        finally:
            self._sender = None

    def flush(self) -> None:
        """Sends what waits, once."""
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            body = msgspec.json.encode(export([(make(), context) for make, context in some]))
            request = urllib.request.Request(
                self._endpoint, body, {"Content-Type": "application/json"}, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                    answer.read()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - self._complained > 60:
                    self._complained = time.monotonic()
                    logger.error("spans could not be sent to %s: %s", self._endpoint, error)
                return


def export(traces: list[tuple[Json, SpanContext]]) -> Json:
    """OTLP's ExportTraceServiceRequest in JSON."""
    spans = [span for trace, context in traces for span in make_spans(trace, context)]
    resource = {"attributes": _attributes({"service.name": "jaxserve"})}
    scope = {"scope": {"name": "jaxserve"}, "spans": spans}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def make_spans(trace: Json, context: SpanContext) -> Iterator[Json]:
    """The request as a span, with its steps and each answer's queue, prefill and decode below it."""
    maker = _SpanMaker(trace, context)
    answers = trace["answers"]
    method, _, path = trace["route"].partition(" ")
    root = maker.span(
        trace["route"],
        context.parent,
        0.0,
        trace["seconds"],
        {
            "http.request.method": method,
            "url.path": path,
            "http.response.status_code": trace["status"],
            "gen_ai.request.model": trace["model"],
            "gen_ai.usage.output_tokens": sum(a.get("generated_tokens", 0) for a in answers),
            "jaxserve.request_id": trace["id"],
            "jaxserve.tenant": trace["tenant"],
            "jaxserve.finish_reason": trace["finish_reason"],
            "jaxserve.device_seconds": trace["device_seconds"],
            "jaxserve.cost": trace["cost"],
        },
        kind=_SPAN_KIND_SERVER,
        failed=trace["status"] >= 500 or trace["finish_reason"] == "error",
    )
    yield root
    yield from maker.server_steps(root["spanId"])
    for answer in answers:
        yield from maker.answer(root["spanId"], answer)


class _SpanMaker:
    def __init__(self, trace: Json, context: SpanContext) -> None:
        self._trace = trace
        self._context = context

    def span(
        self,
        name: str,
        parent: str,
        begin: float,
        end: float,
        attributes: Json,
        *,
        kind: int = _SPAN_KIND_INTERNAL,
        failed: bool = False,
    ) -> Json:
        """begin, end: seconds since the request was received."""
        start = self._trace["received_at"]
        return {
            "traceId": self._context.trace_id,
            "spanId": os.urandom(8).hex(),
            "parentSpanId": parent,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(int((start + begin) * 1e9)),
            "endTimeUnixNano": str(int((start + max(begin, end)) * 1e9)),
            "attributes": _attributes(attributes),
            "status": {"code": _STATUS_ERROR} if failed else {},
        }

    def server_steps(self, parent: str) -> Iterator[Json]:
        """Each lasts from the one before, until the engine has the request."""
        before = 0.0
        for step in self._trace["steps"]:
            if step["name"] in ("detokenised", "written", "finished"):
                continue
            if step["name"] != "received":
                yield self.span(step["name"], parent, before, step["at"], {})
            before = step["at"]

    def answer(self, parent: str, answer: Json) -> Iterator[Json]:
        """What the engine did for one answer."""
        started, first = answer.get("started_at"), answer.get("first_token_at")
        if started is None:
            return
        ended = answer["ended_at"]
        cached = {"jaxserve.cached_tokens": answer["cached_tokens"]}
        yield self.span("queue", parent, answer["queued_at"], started, {})
        tokens = {"gen_ai.usage.input_tokens": answer["prompt_tokens"]}
        yield self.span("prefill", parent, started, first or ended, {**tokens, **cached})
        if first is not None:
            tokens = {
                "gen_ai.usage.output_tokens": answer["generated_tokens"],
                "jaxserve.device_seconds": answer["device_seconds"],
            }
            yield self.span("decode", parent, first, ended, tokens)


def _attributes(values: Json) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Json:
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
