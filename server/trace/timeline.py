"""The trace of one request as JSON: every step of the walk with its time and its counts.

Times are seconds since the request was received. What the engine sums up (`steps` above 1 in a
stretch) is told as means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.request import StepStretch

if TYPE_CHECKING:
    from server.usage.measured import Answer, Measured

Json = dict[str, Any]


def make_trace(measured: Measured) -> Json:
    """The trace of a request that is over."""
    start = measured.received
    return {
        "id": measured.request_id,
        "object": "request.trace",
        "trace_id": measured.context.trace_id,
        "tenant": measured.tenant,
        "model": measured.model,
        "route": measured.route,
        "status": measured.status,
        "received_at": measured.began,
        "seconds": _since(start, measured.finished),
        "finish_reason": measured.finish_reason,
        "device_seconds": round(measured.device_seconds, 9),
        "cost": measured.cost,
        "steps": _steps(measured),
        "answers": [_answer(start, answer) for answer in measured.answers],
    }


def _steps(measured: Measured) -> list[Json]:
    """What the server itself did, in order."""
    start = measured.received
    steps: list[Json] = [{"name": "received", "at": 0.0}]
    steps += [{"name": name, "at": _since(start, at)} for name, at in measured.marks]
    steps.append({"name": "admitted", "at": _since(start, measured.admitted)})
    submitted = min(answer.submitted for answer in measured.answers)
    steps.append(
        {"name": "submitted", "at": _since(start, submitted), "answers": len(measured.answers)}
    )
    if measured.accepted:
        steps.append({"name": "accepted", "at": _since(start, measured.accepted)})
    if measured.num_pieces:
        steps.append(
            {
                "name": "detokenised",
                "at": _since(start, measured.first_piece),
                "until": _since(start, measured.last_piece or measured.finished),
                "pieces": measured.num_pieces,
            }
        )
    if measured.num_events:
        steps.append(
            {
                "name": "written",
                "at": _since(start, measured.first_written),
                "until": _since(start, measured.last_written),
                "events": measured.num_events,
                "bytes": measured.num_bytes,
            }
        )
    steps.append(
        {
            "name": "finished",
            "at": _since(start, measured.finished),
            "status": measured.status,
            "bytes": measured.num_bytes,
        }
    )
    return steps


def _answer(start: float, answer: Answer) -> Json:
    facts = answer.facts
    found: Json = {
        "prompt_tokens": answer.prompt_length,
        "queued_at": _since(start, answer.submitted),
        "finish_reason": answer.reason,
    }
    if facts is None:
        return found
    moments = {
        "started_at": facts.scheduled,
        "first_token_at": facts.first_token,
        "last_token_at": facts.last_token,
        "ended_at": facts.ended,
    }
    return {
        **found,
        **{name: _since(start, at) if at else None for name, at in moments.items()},
        "cached_tokens": facts.num_cached_tokens,
        "computed_prompt_tokens": facts.num_prefill_tokens,
        "generated_tokens": facts.num_generated_tokens,
        "pages": facts.num_pages,
        "cached_pages": facts.num_cached_pages,
        "preemptions": facts.num_preemptions,
        "queue_seconds": round(facts.queue_seconds, 6),
        "device_seconds": round(facts.device_seconds, 9),
        "padding_tokens": round(facts.padding_tokens, 3),
        "engine_steps": facts.steps,
        "prefill": [_stretch(start, each) for each in facts.stretches if each.kind == "prefill"],
        "decode": [_stretch(start, each) for each in facts.stretches if each.kind == "decode"],
    }


def _stretch(start: float, stretch: StepStretch) -> Json:
    steps = stretch.steps
    return {
        "at": _since(start, stretch.begun),
        "until": _since(start, stretch.ended),
        "steps": steps,
        "tokens": stretch.tokens,
        "batch": round(stretch.rows / steps, 2),
        "bucket": round(stretch.bucket_tokens / steps, 2),
        "padding_tokens": round(stretch.padding_tokens, 3),
        "device_seconds": round(stretch.device_seconds, 9),
    }


def _since(start: float, moment: float) -> float:
    return round(moment - start, 6)
