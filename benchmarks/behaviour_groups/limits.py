"""Limits, errors, hostile bodies, and long prompts beside running streams."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from typing import Any

from behaviour_groups.client import (
    CHAT,
    COMPLETIONS,
    ROUTES,
    FailedError,
    Server,
    Stream,
    UntriedError,
    must,
    still_answers,
    together,
)
from behaviour_groups.listed import Behaviour

PROMPT = "The capital of France is"
YES = "Reply with one word: yes."
#: What makes an error body show the server's insides.
INSIDES = ("Traceback", "site-packages", '.py"', "/usr/", "/home/")
WORDS_FOR_LENGTH = ("context", "length", "long", "max_model_len")


def random_ids(server: Server, count: int) -> list[int]:
    """Another prompt each time, so that no cache helps."""
    random_ = random.Random(time.time_ns())
    return [random_.randrange(1000, 20000) for _ in range(count)]


def _context(server: Server) -> int:
    if not server.context:
        raise UntriedError("the server does not say its context")
    return server.context


def too_long(server: Server) -> str:
    """A prompt beyond the context gets a 400 that names the length; requests behind it finish."""
    ids = random_ids(server, _context(server) + 100)
    jobs: list[Any] = [lambda: server.complete(ids, max_tokens=4)]
    jobs += [lambda i=i: server.complete(f"{PROMPT} {i}", max_tokens=4) for i in range(4)]
    answers = together(jobs)
    must(answers[0].status == 400, f"status {answers[0].status}")
    message = answers[0].error["message"]
    must(any(word in message for word in WORDS_FOR_LENGTH), f"the message is {message[:80]!r}")
    statuses = [answer.status for answer in answers[1:]]
    must(statuses == [200] * 4, f"behind it {statuses}")
    return "400, the four behind it finish"


def lengths(server: Server) -> str:
    """No max_tokens on chat runs to a natural end; huge is refused or clipped; an exact fit works."""
    left_out = server.chat(YES)
    must(left_out.finish in ("stop", "length"), f"left out: {left_out.finish}")
    huge = server.chat(YES, max_tokens=10**9)
    must(huge.status in (200, 400), f"huge: {huge.status}")
    beyond = server.chat(YES, max_tokens=10**30)
    must(beyond.status in (200, 400), f"beyond 64 bits: {beyond.status}")
    ids = random_ids(server, _context(server) - 8)
    fits = server.complete(ids, max_tokens=8, ignore_eos=True)
    tokens = fits.usage["completion_tokens"]
    must(tokens == 8, f"an exact fit has {tokens} tokens of 8")
    return f"left out: {left_out.finish}; huge: {huge.status}; an exact fit in full"


#: JSON text of a field, and its name. Temperatures beyond OpenAI's 2 are an addition of vLLM's.
WRONG = (
    ('"temperature": "hot"', "temperature"),
    ('"temperature": -1', "temperature"),
    ('"top_p": 1.5', "top_p"),
    ('"top_p": -0.5', "top_p"),
    ('"max_tokens": -5', "max_tokens"),
    ('"max_tokens": "many"', "max_tokens"),
    ('"n": 0', "n"),
    ('"n": "two"', "n"),
    ('"presence_penalty": 7', "presence_penalty"),
    ('"frequency_penalty": -7', "frequency_penalty"),
    ('"stream": "perhaps"', "stream"),
    ('"stop": 5', "stop"),
    ('"seed": "x"', "seed"),
    ('"logit_bias": [1]', "logit_bias"),
)


def errors_have_form(server: Server) -> str:
    """Wrong values: 4xx with the error object, `param` the field's name, before any event."""
    bad = []
    for stream in ("", '"stream": true, '):
        for text, field in WRONG:
            if field == "stream" and stream:
                continue
            extra = text if "max_tokens" in text else f'{text}, "max_tokens": 2'
            for route, start in ((COMPLETIONS, '"prompt": "x"'), (CHAT, _CHAT_START)):
                body = f'{{"model": "{server.model}", {start}, {stream}{extra}}}'
                answer = server.call("POST", route, body.encode())
                if not 400 <= answer.status < 500:
                    bad.append(f"{text} {answer.status}")
                elif str(answer.error["param"]).rpartition(".")[2] != field:  # or "body.n"
                    bad.append(f"{text} has param {answer.error['param']!r}")
    for body in (b"{", b"", b"[]", b"null", b'"x"'):
        answer = server.call("POST", CHAT, body)
        must(400 <= answer.status < 500, f"{body!r}: {answer.status}")
        must(answer.error["message"], f"{body!r}: no message")
    must(not bad, f"{len(bad)}: {'; '.join(sorted(set(bad))[:4])}")
    return f"{len(WRONG)} wrong values on both routes, whole and streamed"


_CHAT_START = '"messages": [{"role": "user", "content": "x"}]'


def unknown_model(server: Server) -> str:
    """An unknown model: 404 with the error object, on every route that takes one."""
    for route in ROUTES:
        for stream in (False, True):
            answer = server.ask(route, PROMPT, model="no-such-model", max_tokens=2, stream=stream)
            must(answer.status == 404, f"{route}: status {answer.status}")
            must(answer.error["message"], f"{route}: no message")
    answer = server.call("GET", "/v1/models/no-such-model")
    must(answer.status == 404, f"GET /v1/models/no-such-model: {answer.status}")
    must(answer.error["message"], "GET /v1/models/no-such-model: no message")
    return "404 on both routes and on GET /v1/models/{id}"


def unknown_names(server: Server) -> str:
    """Parameter names that do not exist: 400 naming them."""
    taken = []
    for route in ROUTES:
        for name in ("temprature", "max_token", "no_such_parameter"):
            answer = server.ask(route, PROMPT, max_tokens=2, **{name: 1})
            if answer.status != 400 or not answer.names(name):
                taken.append(f"{name} {answer.status}")
    must(not taken, f"accepted and ignored: {', '.join(sorted(set(taken)))}")
    return "3 names on both routes"


def hostile_bodies(server: Server) -> str:
    """Malformed bodies of any kind: never a 5xx, and nothing of the server's insides."""
    deep = b"[" * 20000
    texts = [
        b"\xff\xfe{", b"{" * 5000, deep, deep + b"]" * 20000, b'{"messages": ' + deep,
        b'{"model": 5}', b'{"prompt": {}}', b'{"prompt": [[]]}', b'{"prompt": [1, "x"]}',
        b'{"prompt": [-1]}', b'{"prompt": [1e30]}', b'{"prompt": [99999999]}', b'{"prompt": []}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "x\\u0000y", "max_tokens": 2}',
        b'{"messages": []}', b'{"messages": [{}]}', b'{"messages": "x"}', b'{"messages": [null]}',
        b'{"messages": [{"role": 5, "content": "x"}]}', b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "nobody", "content": "x"}], "max_tokens": 2}',
        b'{"messages": [{"role": "user", "content": [{"type": "nothing"}]}]}',
        b'{"messages": [{"role": "user", "content": [5]}]}',
        b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "stop": [null]}',
        b'{"prompt": "x", "stream_options": 3, "stream": true}', b'{"prompt": "x", "logprobs": -3}',
        b'{"prompt": "x", "max_tokens": 2, "logprobs": 1000000}',
    ]  # fmt: skip
    bad = []
    for text in texts:
        for route in ROUTES:
            answer = server.call("POST", route, text)
            words = answer.body.decode(errors="replace")
            if answer.status >= 500:
                bad.append(f"{text[:40]!r} {answer.status}")
            elif inside := next((word for word in INSIDES if word in words), None):
                bad.append(f"{text[:40]!r} shows {inside!r}")
    still_answers(server)
    must(not bad, f"{len(bad)} of {2 * len(texts)}: {'; '.join(bad[:3])}")
    return f"{2 * len(texts)} bodies"


def huge_prompt(server: Server) -> str:
    """While a prompt of 12 MB arrives and is read: health within 1 s, a short stream within 3 s."""
    body = server.body(COMPLETIONS, "many different words " * 600_000, max_tokens=2)
    data = json.dumps(body).encode()
    huge: list[Any] = []

    def send() -> None:
        try:
            huge.append(server.call("POST", COMPLETIONS, data).status)
        except FailedError as error:  # closed in the middle of it: a refusal that could not be read
            huge.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    slowest_health = slowest_stream = 0.0
    start = time.monotonic()
    while thread.is_alive() or time.monotonic() - start < 2:
        slowest_health = max(slowest_health, server.call("GET", "/health").seconds)
        stream = server.stream(COMPLETIONS, PROMPT, max_tokens=2).whole()
        slowest_stream = max(slowest_stream, stream.content_times[0] - stream.sent)
    thread.join()
    seen = f"health {slowest_health:.2f} s, first token {slowest_stream:.2f} s, huge {huge[0]}"
    must(slowest_health <= 1 and slowest_stream <= 3 and huge[0] in (400, 413), seen)
    still_answers(server)
    return seen


def _largest_gap(server: Server, count: int) -> tuple[float, float]:
    """Of a stream that runs while a prompt of `count` tokens is read; and the reading's seconds."""
    running: list[Stream] = []
    ids = random_ids(server, 20)

    def run() -> None:
        running.append(server.stream(COMPLETIONS, ids, max_tokens=1000, ignore_eos=True))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    answer = server.complete(random_ids(server, count), max_tokens=1)
    thread.join()
    must(answer.status == 200, f"status {answer.status}")
    times = running[0].whole().content_times
    if times[-1] < start + answer.seconds / 2:
        raise UntriedError("the stream ended before the long prompt was read")
    gaps = [b - a for a, b in itertools.pairwise(times) if b > start]
    return max(gaps), answer.seconds


def long_prompt_beside_streams(server: Server) -> str:
    """While a long prompt is read, a running stream's largest gap is below half of that time."""
    long = min(6000, _context(server) - 600)
    short_gap, _ = _largest_gap(server, long // 3)
    gap, reading = _largest_gap(server, long)
    seen = f"largest gap {gap:.2f} s of {reading:.1f} s for {long} tokens"
    must(gap < reading / 2, seen)
    return f"{seen}, {short_gap:.2f} s beside {long // 3}"


def cost_per_token(server: Server) -> str:
    """What a prompt costs per token grows by no more than attention's share: a line at most."""
    sizes = [n * (_context(server) - 192) // 8 for n in (1, 4, 7)]
    costs = []
    for count in sizes:
        times = [server.complete(random_ids(server, count), max_tokens=1) for _ in range(2)]
        costs.append(1000 * min(answer.seconds for answer in times) / count)
    pairs = zip(costs, sizes, strict=True)
    seen = "ms a token: " + ", ".join(f"{cost:.2f} of {size}" for cost, size in pairs)
    must(costs[2] - costs[1] <= 1.5 * (costs[1] - costs[0]) + 0.3 * costs[0], seen)
    return seen


def everyday(server: Server) -> str:
    """4,000 tokens in, 300 out, streamed: all tokens, no stall, the same start again, and sooner."""
    if _context(server) < 4400:
        raise UntriedError(f"the context is {server.context}")
    ids = random_ids(server, 4000)
    fields: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    fields["stream_options"] = {"include_usage": True}
    first, again = (server.stream(COMPLETIONS, ids, **fields).whole() for _ in range(2))
    waits = []
    for stream in (first, again):
        usage = stream.usages[-1]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        must(counts == (4000, 300), f"counts {counts}")
        must(max(stream.gaps) < 1, f"a gap of {max(stream.gaps):.1f} s")
        waits.append(stream.content_times[0] - stream.sent)
    same = first.text() == again.text()
    must(first.text()[:60] == again.text()[:60], "another start when repeated")
    seen = f"first token after {waits[0]:.2f} s, again {waits[1]:.2f} s"
    must(waits[1] < waits[0] / 2, seen)
    return seen + ("; the same text" if same else "; the same start")


CHECKS = (
    Behaviour("19", "longer than the context: 400, the queue goes on", too_long),
    Behaviour("21", "max_tokens left out, huge, and an exact fit", lengths),
    Behaviour("35", "wrong values: 4xx, `param` names the field", errors_have_form),
    Behaviour("35", "unknown model: 404", unknown_model),
    Behaviour("35", "unknown parameter names: 400", unknown_names),
    Behaviour("35", "malformed bodies: never a 5xx", hostile_bodies),
    Behaviour("36", "health and streams while 12 MB arrive", huge_prompt),
    Behaviour("47", "a long prompt does not stall running streams", long_prompt_beside_streams),
    Behaviour("47", "the cost per token grows by attention alone", cost_per_token),
    Behaviour("everyday", "4,000 tokens in, 300 out, twice", everyday),
)
