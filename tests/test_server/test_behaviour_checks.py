"""The checks of benchmarks/behaviours.py that do not depend on a model, on the server of these
tests; and what becomes of a server that does not behave."""

from __future__ import annotations

import http.server
import importlib
import json
import pathlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from running_server import RunningServer

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
CATCHES = (
    "streaming.empty_stop",
    "streaming.one_finish",
    "streaming.choices_of_streams",
    "streaming.usage_only_if_asked",
    "streaming.usage_adds_up",
    "streaming.frames",
    "sampling.choices_differ",
    "sampling.bad_logit_bias",
    "sampling.bad_repetition_penalty",
    "limits.errors_have_form",
    "limits.unknown_model",
    "limits.unknown_names",
    "plain_http.stream_headers",
    "plain_http.request_id",
    "plain_http.content_type",
    "plain_http.statuses",
    "plain_http.old_http",
    "plain_http.keep_alive",
    "forms.invalid_forms",
)
#: What a server that says 200 and the same words to everybody does, too.
EASY = (
    "sampling.seeds_in_company",
    "sampling.penalties_in_company",
    "batching.bursts",
    "limits.hostile_bodies",
    "plain_http.health",
    "plain_http.chunked",
    "plain_http.slow_clients",
    "plain_http.errors_show_nothing",
)


@pytest.fixture
def behaviours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("behaviours")


def find(behaviours: ModuleType, name: str) -> Any:
    module, _, function = name.partition(".")
    found = getattr(getattr(behaviours, module), function)
    return next(each for each in behaviours.CHECKS if each.check is found)


@pytest.mark.parametrize("name", CATCHES + EASY)
def test_what_needs_no_model_holds(
    behaviours: ModuleType, server: RunningServer, name: str
) -> None:
    there = behaviours.Server(name="it", url=server.url, model="fake", context=600)
    outcome, words = behaviours.try_once(find(behaviours, name), there)
    assert (outcome, bool(words)) == ("pass", True), words


class Careless(http.server.BaseHTTPRequestHandler):
    """Says 200 and the same words to everybody."""

    def answer(self) -> None:
        choices = [{"index": 0, "text": "x", "message": {"content": "x"}, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 3}
        body = json.dumps({"choices": choices, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the base class calls them so

    def log_message(self, *_: Any) -> None:
        """Not into the tests' output."""


@pytest.fixture(scope="module")
def careless() -> Iterator[str]:
    there = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    thread = threading.Thread(target=there.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{there.server_port}"
    there.shutdown()
    thread.join()
    there.server_close()


@pytest.mark.parametrize("name", CATCHES)
def test_a_careless_server_is_found_out(behaviours: ModuleType, careless: str, name: str) -> None:
    there = behaviours.Server(name="it", url=careless, model="fake", context=600)
    outcome, words = behaviours.try_once(find(behaviours, name), there)
    assert outcome == "FAIL", words


def test_the_worst_of_all_repeats_counts(behaviours: ModuleType) -> None:
    seen = behaviours.judge([("pass", "a"), ("FAIL", "b|c"), ("refused", "d")])
    assert behaviours.cell(seen) == "FAIL (1 of 3): b\\|c"
    assert behaviours.cell(behaviours.judge([("pass", "a"), ("pass", "b")])) == "pass: b"
    assert behaviours.judge([("not tried", "a"), ("pass", "b")]).outcome == "pass"
    check = find(behaviours, "plain_http.health")
    table = behaviours.report([check], {"one": [seen], "two": [seen]}, "head")
    assert table[2] == "| | behaviour | one | two |"
    assert table[-1] == "two: 0 pass, 1 FAIL, 0 refused, 0 not tried."
