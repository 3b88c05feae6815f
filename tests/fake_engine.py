"""A stand-in for the engine process, in plain Python: jaxserve/messages.py with made-up arithmetic.

    python tests/fake_engine.py --address ipc:///... --config '{"model": "x"}' [--log FILE] ...

Its model knows `byte_tokenizer`'s ids. A prompt may direct it: "@say:TEXT@" answers TEXT and ends,
"@pause:MS@" waits that long between tokens, "@fail@" fails after three tokens. Otherwise the next
token is a letter that depends on the last ids, the position and, above temperature 0, the seed.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import json
import re
import sys
import time
import uuid
import zlib

import msgspec
import zmq

from jaxserve.config import EngineConfig
from jaxserve.messages import (
    BEAT_SECONDS,
    WORKER_DEAD_AFTER_SECONDS,
    Abort,
    Beat,
    EngineInfo,
    FromEngine,
    Goodbye,
    MetricsReply,
    MetricsRequest,
    Orphan,
    Orphans,
    Output,
    StepOutputs,
    Submit,
    decode_from_worker,
    encode,
)
from jaxserve.request import (
    FinishReason,
    GenerationRequest,
    RequestFacts,
    Score,
    StepStretch,
    TokenLogprobs,
)

EOS_IDS = (257, 259)
VOCAB = 260
Key = tuple[bytes, int]


@dataclasses.dataclass
class Job:
    """One request at work."""

    request: GenerationRequest
    script: list[int] | None
    pause: float
    fails: bool
    num_cached: int
    made: list[int] = dataclasses.field(default_factory=list)
    next_at: float = 0.0

    @classmethod
    def of(cls, request: GenerationRequest, num_cached: int) -> Job:
        text = bytes(i for i in request.prompt_ids if i < 256).decode("utf-8", "replace")
        say = re.findall(r"@say:(.*?)@", text, re.S)
        pause = re.findall(r"@pause:(\d+)@", text)
        return cls(
            request=request,
            script=[*say[-1].encode(), EOS_IDS[0]] if say else None,
            pause=int(pause[-1]) / 1000 if pause else 0.0,
            fails="@fail@" in text,
            num_cached=num_cached,
        )

    def read(self) -> Output:
        """Of a prompt that is only read: eight numbers, or -0.5 for each of its tokens."""
        ids, score = self.request.prompt_ids, self.request.score
        if score is not Score.LOGPROBS:
            seen = ids if score is Score.MEAN else ids[-1:]
            numbers = [sum((token + k) % 7 for token in seen) / len(seen) for k in range(8)]
            return Output(0, [], "stop", embedding=array.array("f", numbers).tobytes())
        count = self.request.sampling.logprobs or 0
        tops = list(range(97, 97 + count))
        logprobs = [
            TokenLogprobs(
                token_id=token,
                logprob=-0.5,
                top_ids=tops,
                top_logprobs=[-1.0 - k for k in range(count)],
            )
            for token in ids[1:]
        ]
        return Output(0, [], "stop", logprobs=logprobs)

    def step(self) -> Output:
        if self.request.score is not None:
            return self.read()
        sampling = self.request.sampling
        position = len(self.made)
        if self.fails and position == 3:
            return Output(0, [], "error", error="the fake engine was told to fail")
        if self.script is not None:
            token = self.script[min(position, len(self.script) - 1)]
        else:
            tail = [*self.request.prompt_ids[-8:], *self.made[-8:]][-8:]
            seed = sampling.seed if sampling.temperature > 0 else 0
            token = 97 + zlib.crc32(repr((seed, position, tail)).encode()) % 26
        self.made.append(token)
        finish = None
        if (token in EOS_IDS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish = "stop"
        elif len(self.made) >= (sampling.max_tokens or 0):
            finish = "length"
        logprobs = None
        if sampling.logprobs is not None:
            top = [(token + k) % VOCAB for k in range(sampling.logprobs)]
            logprobs = [
                TokenLogprobs(
                    token_id=token,
                    logprob=-0.25,
                    top_ids=top,
                    top_logprobs=[-0.25 - k for k in range(len(top))],
                )
            ]
        return Output(0, [token], finish, self.num_cached, logprobs)


def fake_facts(job: Job, reason: str | None) -> RequestFacts:
    """A millisecond of device time per token, the prompt in one chunk of 16 times 2**k tokens."""
    made, length, now = len(job.made), len(job.request.prompt_ids), time.monotonic()
    computed = length - job.num_cached
    bucket = 16
    while bucket < computed:
        bucket *= 2
    chunk = {"tokens": computed, "bucket_tokens": bucket, "padding_tokens": bucket - computed}
    stretches = [
        StepStretch(kind="prefill", begun=now, ended=now, steps=1, rows=1, **chunk),
        StepStretch(kind="decode", begun=now, ended=now, steps=made, tokens=made, rows=made),
    ]
    return RequestFacts(
        finish_reason=FinishReason(reason or "abort"),
        num_cached_tokens=job.num_cached,
        num_generated_tokens=made,
        num_prefill_tokens=computed,
        num_pages=-(-(length + made) // 16),
        num_cached_pages=job.num_cached // 16,
        padding_tokens=bucket - computed,
        queue_seconds=0.25,
        device_seconds=(computed + made) / 1000,
        steps=1 + made,
        scheduled=now,
        first_token=now if made else 0.0,
        last_token=now if made else 0.0,
        ended=now,
        stretches=[each for each in stretches if each.steps] if job.request.trace else [],
    )


class FakeEngine:
    """The step loop: one token per running request and step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = msgspec.json.decode(args.config, type=EngineConfig)
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.router_mandatory = 1
        self.socket.linger = 0
        self.socket.bind(args.address)
        self.epoch = uuid.uuid4().hex
        self.started = time.monotonic()
        self.workers: dict[bytes, float] = {}
        self.waiting: dict[Key, Job] = {}
        self.running: dict[Key, Job] = {}
        self.pages: set[int] = set()
        self.finished: collections.Counter[str] = collections.Counter()
        self.tokens: collections.Counter[str] = collections.Counter()
        self.orphans: list[Orphan] = []
        self.log = open(args.log, "a", buffering=1) if args.log else None  # noqa: SIM115
        self.note("start")

    def note(self, event: str, **fields: object) -> None:
        if self.log:
            self.log.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")

    def send(self, worker: bytes, message: FromEngine) -> None:
        try:
            self.socket.send_multipart((worker, encode(message)))
        except zmq.ZMQError:
            self.forget(worker)

    def forget(self, worker: bytes) -> None:
        self.workers.pop(worker, None)
        for key in [key for key in (*self.waiting, *self.running) if key[0] == worker]:
            request = (self.waiting.get(key) or self.running[key]).request
            facts = self.abort(key, "abort")
            length = len(request.prompt_ids)
            self.orphans.append(Orphan(request.tenant, request.request_id, length, facts))

    def end(self, worker: bytes, rid: int, reason: str) -> None:
        facts = self.abort((worker, rid), reason)
        self.send(worker, StepOutputs([Output(rid, [], reason, facts=facts)]))

    def abort(self, key: Key, reason: str) -> RequestFacts | None:
        job = self.waiting.pop(key, None) or self.running.pop(key, None)
        if job:
            self.finished[reason] += 1
            self.note(reason, rid=key[1], made=len(job.made), id=job.request.request_id)
        return fake_facts(job, reason) if job else None

    def beat(self) -> Beat:
        ready = time.monotonic() - self.started >= self.args.load_seconds
        info = EngineInfo(
            model_name=self.config.model_name,
            vocab_size=VOCAB,
            max_model_len=self.config.max_model_len or 4096,
            max_logprobs=20,
            page_size=16,
            num_pages=self.config.num_pages or 4096,
            embeddings=self.config.embeddings,
            prompt_logprobs=self.config.prompt_logprobs,
        )
        return Beat(
            self.epoch, ready, info if ready else None, len(self.running), len(self.waiting)
        )

    def submit(self, worker: bytes, message: Submit) -> None:
        request, key = message.request, (worker, message.rid)
        self.note("submit", id=request.request_id, request=msgspec.to_builtins(request))
        if message.epoch != self.epoch:
            output = Output(message.rid, [], "error", error="the engine was restarted", status=503)
        elif len(self.waiting) >= self.config.max_queue_len:
            output = Output(message.rid, [], error="queue full", refused="queue_full", status=429)
        else:
            output = Output(message.rid, [])
            self.waiting[key] = Job.of(request, self.cached(request))
        self.send(worker, StepOutputs([output]))

    def cached(self, request: GenerationRequest) -> int:
        """Length of the prompt's known prefix in whole pages, less than the prompt."""
        chain, found, ids = hash(request.cache_salt), 0, request.prompt_ids
        for start in range(0, len(ids) - 16, 16):
            chain = hash((chain, tuple(ids[start : start + 16])))
            if chain in self.pages and found == start:
                found = start + 16
            self.pages.add(chain)
        return found

    def metrics(self) -> str:
        label = f'model_name="{self.config.model_name}"'
        lines = []
        for name, kind, value in (
            ("num_requests_running", "gauge", len(self.running)),
            ("num_requests_waiting", "gauge", len(self.waiting)),
            ("generation_tokens_total", "counter", self.tokens["made"]),
        ):
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{label}}} {value}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in sorted(self.finished.items()):
            labels = f'{label},finished_reason="{reason}"'
            lines.append(f"vllm:request_success_total{{{labels}}} {count}")
        return "\n".join(lines) + "\n"

    def receive(self) -> None:
        while True:
            try:
                worker, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_from_worker(data)
            self.workers[worker] = time.monotonic()
            if isinstance(message, Submit):
                self.submit(worker, message)
                if self.orphans:
                    orphans, self.orphans = self.orphans, []
                    self.send(worker, Orphans(orphans))
            elif isinstance(message, Abort):
                for rid in message.rids:
                    self.end(worker, rid, message.reason)
            elif isinstance(message, MetricsRequest):
                self.send(worker, MetricsReply(message.rid, self.metrics()))
            elif isinstance(message, Goodbye):
                self.note("goodbye")
                self.forget(worker)
            else:
                self.send(worker, self.beat())

    def step(self) -> None:
        now = time.monotonic()
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            key = next(iter(self.waiting))
            self.running[key] = self.waiting.pop(key)
        outputs: dict[bytes, list[Output]] = collections.defaultdict(list)
        for key, job in list(self.running.items()):
            if now < job.next_at:
                continue
            output = job.step()
            job.next_at = now + job.pause
            self.tokens["made"] += len(output.token_ids)
            if output.finish_reason:
                del self.running[key]
                self.finished[output.finish_reason] += 1
                facts = fake_facts(job, output.finish_reason)
                output = msgspec.structs.replace(output, facts=facts)
            outputs[key[0]].append(msgspec.structs.replace(output, rid=key[1]))
            if self.args.log_tokens:
                self.note("token", id=job.request.request_id)
        for worker, batch in outputs.items():
            self.send(worker, StepOutputs(batch))

    def run(self) -> None:
        next_beat = next_step = 0.0
        while True:
            now = time.monotonic()
            busy = bool(self.running or self.waiting)
            until = min(next_beat, next_step) if busy else next_beat
            if self.socket.poll(max(0, int((until - now) * 1000))):
                self.receive()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                for worker, seen in list(self.workers.items()):
                    if now - seen > WORKER_DEAD_AFTER_SECONDS:
                        self.forget(worker)
                    else:
                        self.send(worker, self.beat())
            if now >= next_step:
                next_step = now + self.args.step_ms / 1000
                self.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--log-level")
    parser.add_argument("--log")
    parser.add_argument("--log-tokens", action="store_true")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--exit-code", type=int)
    args = parser.parse_args()
    if args.exit_code is not None:
        print("fake engine: no such model 'nowhere'; try another", file=sys.stderr, flush=True)
        sys.exit(args.exit_code)
    FakeEngine(args).run()


if __name__ == "__main__":
    main()
