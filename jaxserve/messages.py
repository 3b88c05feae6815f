"""Messages between front-end workers and the engine process (between steps 3 and 4, and 7 and 8).

msgpack, one message per ZeroMQ frame. A worker is a DEALER with its own identity; the engine
is one ROUTER bound on `ipc://` in a private folder. Request ids (`rid`) are integers chosen by
the worker, unique per worker; the engine keys its requests by (worker identity, rid).
Structs are arrays on the wire: add fields at the end only.
"""

from __future__ import annotations

import msgspec

from jaxserve.request import GenerationRequest, RequestFacts, TokenLogprobs

BEAT_SECONDS = 1.0
#: Silence after which the engine counts as gone: beats it sends from a thread of its own.
DEAD_AFTER_SECONDS = 4.0
#: The same for a worker, which may be busy with thousands of new requests. One that died is noticed
#: at once, when the next message to it finds no connection.
WORKER_DEAD_AFTER_SECONDS = 30.0


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Worker to engine, every beat: I am here. The engine answers with a Beat."""

    pid: int


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Worker to engine: a new request. A stale `epoch` (engine restarted) is answered with an error."""

    rid: int
    epoch: str
    request: GenerationRequest


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Worker to engine: stop working on these. `reason` is "abort" (client left) or "stop" (stop string)."""

    rids: list[int]
    reason: str = "abort"


class MetricsRequest(msgspec.Struct, tag="metrics", array_like=True, frozen=True):
    """Worker to engine: the current metrics, please."""

    rid: int


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, frozen=True):
    """Worker to engine: I am leaving; abort what is still mine."""


class Output(msgspec.Struct, array_like=True, frozen=True):
    """What one step produced for one request; fields as in `jaxserve.request.TokenOutput`."""

    rid: int
    token_ids: list[int]
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    #: Set on a refusal: a short stable word (queue_full, queue_tokens, ...) and its HTTP status.
    refused: str | None = None
    status: int = 0
    #: The request's field that a refusal is about.
    param: str | None = None
    embedding: bytes | None = None
    #: With the last output; after an Abort, an output with these alone comes, too.
    facts: RequestFacts | None = None


class StepOutputs(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """Engine to worker: everything that one engine step produced for this worker's requests."""

    outputs: list[Output]


class Orphan(msgspec.Struct, array_like=True, frozen=True):
    """A request that was ended since its worker is gone. facts: None for one that was only read."""

    tenant: str
    request_id: str
    num_prompt_tokens: int
    facts: RequestFacts | None


class Orphans(msgspec.Struct, tag="orphans", array_like=True, frozen=True):
    """Engine to a worker that is there: what another one left behind, to be written down."""

    orphans: list[Orphan]


class MetricsReply(msgspec.Struct, tag="metrics_reply", array_like=True, frozen=True):
    """Engine to worker: Prometheus exposition text."""

    rid: int
    text: str


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the front end must know of the engine and its model."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    page_size: int
    num_pages: int
    #: What else the engine was started for: the default pooling of embeddings, or none of them.
    embeddings: str = "off"
    prompt_logprobs: bool = False


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Engine to every known worker, each beat and in answer to Hello.

    A new epoch means that the engine was restarted and knows no earlier request.
    `ready` means: model loaded, programs compiled and the step loop moving; `info` is set then.
    """

    epoch: str
    ready: bool
    info: EngineInfo | None = None
    num_running: int = 0
    num_waiting: int = 0


FromWorker = Hello | Submit | Abort | MetricsRequest | Goodbye
FromEngine = StepOutputs | MetricsReply | Beat | Orphans

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
