"""Spans as a collector gets them: one tree per request, below the caller's span if it has one."""

from __future__ import annotations

import http.server
import json
import logging
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from app_alone import make_app, post

from server.trace.otlp import read_traceparent
from server.usage.meter import EXTENSION

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"messages": [{"role": "user", "content": "a question"}], "max_tokens": 4}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was sent there."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", got
    server.shutdown()
    server.server_close()


def test_a_request_is_a_tree_of_spans_below_its_caller(
    collector: tuple[str, list[Any]], tmp_path: pathlib.Path
) -> None:
    url, got = collector
    app = make_app(otlp_endpoint=url)
    web = app.test_client()
    head = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    post(web, "/v1/chat/completions", {**CHAT, "n": 2}, **head)
    post(web, "/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{SPAN}-00")  # not sampled
    post(web, "/v1/chat/completions", CHAT, traceparent="nonsense")
    app.extensions[EXTENSION].exporter.flush()
    (sent,) = got
    (resource,) = sent["resourceSpans"]
    assert resource["resource"]["attributes"][0]["value"] == {"stringValue": "jaxserve"}
    spans = resource["scopeSpans"][0]["spans"]
    ours = [span for span in spans if span["traceId"] == TRACE]
    root = ours[0]
    assert (root["name"], root["parentSpanId"], root["kind"]) == (
        "POST /v1/chat/completions",
        SPAN,
        2,
    )
    assert all(span["parentSpanId"] == root["spanId"] for span in ours[1:])
    names = [span["name"] for span in ours[1:]]
    assert names[:3] == ["body_read", "context_assembled", "tokenised"]
    assert names[-6:] == ["queue", "prefill", "decode"] * 2
    for span in ours:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    values = {each["key"]: each["value"] for each in root["attributes"]}
    assert values["gen_ai.usage.output_tokens"] == {"intValue": "8"}
    assert values["http.response.status_code"] == {"intValue": "200"}
    others = {span["traceId"] for span in spans} - {TRACE}
    assert len(others) == 1, "what is not sampled is not sent, what is broken begins a new trace"
    assert len({span["spanId"] for span in spans}) == len(spans)


def test_a_collector_that_is_gone_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(otlp_endpoint="http://127.0.0.1:9/v1/traces")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert post(app.test_client(), "/v1/chat/completions", CHAT).status_code == 200
            app.extensions[EXTENSION].exporter.flush()
    assert len([record for record in caplog.records if "spans" in record.message]) == 1


@pytest.mark.parametrize(
    "header",
    [
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_a_traceparent_that_the_standard_forbids_is_not_taken(header: str) -> None:
    context = read_traceparent(header)
    assert context.trace_id not in header.lower()
    assert context.parent == ""
