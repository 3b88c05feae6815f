"""A trace as Chrome's trace events, which Perfetto and chrome://tracing open.

One process for the server's own steps, and a thread for each answer in the engine's. Microseconds.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_SERVER, _ENGINE = 1, 2


def chrome_trace(trace: Json) -> Json:
    """`{"traceEvents": [...]}`."""
    events = [
        _name("process_name", _SERVER, 0, "server"),
        _name("process_name", _ENGINE, 0, "engine"),
        _name("thread_name", _SERVER, 0, trace["id"]),
        _name("thread_name", _SERVER, 1, "written"),
        _span(trace["route"], _SERVER, 0, 0.0, trace["seconds"], _counts(trace, _SUMMARY)),
        *_server_steps(trace["steps"]),
    ]
    for number, answer in enumerate(trace["answers"]):
        events.append(_name("thread_name", _ENGINE, number, f"answer {number}"))
        events += _answer(number, answer)
    events.sort(key=_place)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"id": trace["id"]}}


def _place(event: Json) -> tuple[int, int, bool, float, float]:
    """Thread by thread, names first, then by time; what holds others before what it holds."""
    named = event["ph"] != "M"
    return event["pid"], event["tid"], named, event["ts"], -event.get("dur", 0.0)


_SUMMARY = ("tenant", "model", "status", "finish_reason", "device_seconds", "cost")


def _server_steps(steps: list[Json]) -> list[Json]:
    """Each step lasts from the one before to its own moment, unless it says how long it took."""
    events, before = [], 0.0
    for step in steps:
        arguments = {name: step[name] for name in step.keys() - {"name", "at", "until"}}
        if "until" in step:
            events.append(_span(step["name"], _SERVER, 1, step["at"], step["until"], arguments))
        elif step["name"] == "finished":
            events.append(_instant(step["name"], _SERVER, 0, step["at"], arguments))
        else:
            events.append(_span(step["name"], _SERVER, 0, before, step["at"], arguments))
            before = step["at"]
    return events


def _answer(thread: int, answer: Json) -> list[Json]:
    started = answer.get("started_at")
    if started is None:
        return [_instant(f"ended: {answer['finish_reason']}", _ENGINE, thread, answer["queued_at"])]
    counts = _counts(answer, ("cached_tokens", "cached_pages", "pages", "preemptions"))
    events = [_span("queued", _ENGINE, thread, answer["queued_at"], started, counts)]
    for kind in ("prefill", "decode"):
        for stretch in answer[kind]:
            arguments = {name: stretch[name] for name in stretch.keys() - {"at", "until"}}
            many = f" x {stretch['steps']}" if stretch["steps"] > 1 else ""
            events.append(
                _span(kind + many, _ENGINE, thread, stretch["at"], stretch["until"], arguments)
            )
    if answer["first_token_at"] is not None:
        events.append(_instant("first token", _ENGINE, thread, answer["first_token_at"]))
    reason = f"ended: {answer['finish_reason']}"
    events.append(_instant(reason, _ENGINE, thread, answer["ended_at"]))
    return events


def _counts(source: Json, names: tuple[str, ...]) -> Json:
    return {name: source.get(name) for name in names}


def _span(name: str, process: int, thread: int, begin: float, end: float, arguments: Json) -> Json:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": _microseconds(begin),
        "dur": max(0, _microseconds(end) - _microseconds(begin)),
        "args": arguments,
    }


def _instant(
    name: str, process: int, thread: int, at: float, arguments: Json | None = None
) -> Json:
    event = {"name": name, "ph": "i", "s": "t", "pid": process, "tid": thread}
    return {**event, "ts": _microseconds(at), "args": arguments or {}}


def _name(kind: str, process: int, thread: int, name: str) -> Json:
    event = {"name": kind, "ph": "M", "pid": process, "tid": thread, "ts": 0}
    return {**event, "args": {"name": name}}


def _microseconds(seconds: float) -> int:
    """Whole ones, which a trace's moments are: spans that meet must not overlap by a rounding."""
    return round(seconds * 1e6)
