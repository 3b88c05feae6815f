"""Answers in batches, from the prefix cache, and in crowds."""

from __future__ import annotations

import random
import time
from typing import Any

from behaviour_groups.client import (
    COMPLETIONS,
    Answer,
    Server,
    Stream,
    UntriedError,
    company,
    must,
    must_equal,
    together,
)
from behaviour_groups.listed import Behaviour

TOLERANCE = 1e-5
PROMPT = "The most important thing about the sea is that"
COMPILED = "jaxserve:compilations_after_ready"


def words(seed: int, count: int) -> str:
    """Made-up sentences of about `count` tokens."""
    random_ = random.Random(seed)
    known = [
        "the",
        "river",
        "stone",
        "light",
        "under",
        "small",
        "green",
        "house",
        "walked",
        "slowly",
        "toward",
        "old",
        "quiet",
        "city",
    ]
    return " ".join(random_.choice(known) for _ in range(count))


def _difference(wanted: Answer, found: Answer, where: str) -> float:
    """The largest one of log-probabilities. Raises FailedError for another text."""
    must_equal(wanted.text, found.text, where)
    numbers = [answer.choices[0]["logprobs"]["token_logprobs"] for answer in (wanted, found)]
    return max(abs(a - b) for a, b in zip(*numbers, strict=True))


def _within(difference: float) -> str:
    seen = f"log-probabilities within {difference:.1g}"
    must(difference <= TOLERANCE, seen)
    return seen


def _in_batches(server: Server) -> float:
    """The largest difference between an answer alone, in a batch, and joining one."""
    fields: dict[str, Any] = {"max_tokens": 32, "logprobs": 1}
    alone = server.complete(PROMPT, **fields)
    largest = _difference(alone, server.complete(PROMPT, **fields), "alone, again")
    peers = [words(i, 8 * i) for i in range(1, 9)]
    jobs = [lambda p=peer: server.complete(p, max_tokens=32) for peer in peers]
    batch = together([*jobs, lambda: server.complete(PROMPT, **fields)])
    largest = max(largest, _difference(alone, batch[-1], "in a batch of nine"))
    with company(server, peers, max_tokens=80, ignore_eos=True):
        joined = server.complete(PROMPT, **fields)
    return max(largest, _difference(alone, joined, "joining eight"))


def same_text_in_a_batch(server: Server) -> str:
    """Greedy text alone, in a batch, and joining one."""
    _in_batches(server)
    return "alone, in a batch of nine, joining eight"


def same_numbers_in_a_batch(server: Server) -> str:
    """The same, and log-probabilities within 1e-5."""
    return _within(_in_batches(server))


def _from_the_cache(server: Server) -> tuple[float, int, int]:
    """The largest difference between cold and cached; tokens cached, and all of the prompt."""
    # The time keeps a second round from finding the pages of the first.
    salt = f"{time.time():.6f}"
    prefix, fields = f"{salt} " + words(1, 400), {"max_tokens": 24, "logprobs": 1}

    def ask(suffix: str, name: str) -> Answer:
        return server.complete(prefix + suffix, cache_salt=f"{salt}{name}", **fields)

    cold = ask(" so", "a")
    if cold.names("cache_salt"):
        raise UntriedError("cache_salt is refused, so that nothing is cold")
    again = ask(" so", "a")
    other = ask(" but", "b")
    largest = max(
        _difference(cold, again, "from the cache"),
        _difference(other, ask(" but", "a"), "another suffix"),
    )
    pair = together([lambda: ask(" so", "a"), lambda: ask(" but", "c")])
    largest = max(largest, _difference(cold, pair[0], "a hit beside a miss"))
    largest = max(largest, _difference(other, pair[1], "a miss beside a hit"))
    details = again.usage.get("prompt_tokens_details") or {}
    return largest, details.get("cached_tokens") or 0, again.usage["prompt_tokens"]


def same_text_from_the_cache(server: Server) -> str:
    """Equal cold, cached, with another suffix, and with a hit and a miss in one batch."""
    _, cached, total = _from_the_cache(server)
    must(0 < cached < total, f"cached_tokens {cached} of {total}")
    return f"{cached} of {total} tokens cached"


def same_numbers_from_the_cache(server: Server) -> str:
    """The same, and log-probabilities within 1e-5."""
    return _within(_from_the_cache(server)[0])


def bursts(server: Server) -> str:
    """32 requests started together each equal their solo run."""
    prompts = [f"Item {i}: {words(100 + i, 3 + i)}" for i in range(32)]
    fields: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    alone = [server.complete(prompt, **fields).text for prompt in prompts]
    crowd = together([lambda p=p: server.complete(p, **fields).text for p in prompts])
    other = [i for i in range(32) if crowd[i] != alone[i]]
    mixed = [i for i in other if crowd[i] in alone]
    must(not mixed, f"{len(mixed)} of 32 have another's text")
    must(not other, f"{len(other)} of 32 texts differ from their solo run (none is another's)")
    return "32 texts as alone"


def drains(server: Server) -> str:
    """Requests of many lengths ending one by one all complete; no program is compiled later."""
    lengths = list(range(1, 41))
    jobs = [
        lambda n=n: server.complete(words(n, 3 * n), max_tokens=n, ignore_eos=True) for n in lengths
    ]
    found = [answer.usage["completion_tokens"] for answer in together(jobs)]
    must(found == lengths, f"tokens {found}")
    server.complete(PROMPT, max_tokens=2, logprobs=5, min_p=0.1, top_k=7, temperature=1)
    try:
        compiled = server.metric(COMPILED)
    except UntriedError:
        return "40 lengths; programs compiled later are not counted here"
    must(compiled == 0, f"{compiled:g} programs compiled after ready")
    return "40 lengths, 0 programs compiled after ready"


def crowds(server: Server) -> str:
    """64 streams at once, five rounds, and 256 at once: each whole, or a clean 429/503."""
    refused = 0
    for round_ in range(6):
        count, length = (64, 12) if round_ < 5 else (256, 4)
        jobs = [
            lambda i=i, n=length: server.stream(
                COMPLETIONS,
                f"{i} {PROMPT}",
                max_tokens=n,
                ignore_eos=True,
                stream_options={"include_usage": True},
            )
            for i in range(count)
        ]
        for stream in together(jobs):
            if stream.status in (429, 503):
                must(b'"error"' in stream.raw, f"{stream.status} without an error body")
                refused += 1
            else:
                _full(stream.whole(), length)
    return f"576 streams, {refused} of them refused"


def _full(stream: Stream, length: int) -> None:
    tokens = stream.usages[-1]["completion_tokens"]
    must(tokens == length, f"{tokens} tokens of {length}")


CHECKS = (
    Behaviour("11", "greedy text does not depend on the batch", same_text_in_a_batch),
    Behaviour("11", "nor do its log-probabilities (1e-5)", same_numbers_in_a_batch),
    Behaviour("12", "first and cached text are equal; cached_tokens", same_text_from_the_cache),
    Behaviour("12", "and so are log-probabilities (1e-5)", same_numbers_from_the_cache),
    Behaviour("16", "a burst's answers equal their solo runs", bursts),
    Behaviour("17", "batches drain through every size", drains),
    Behaviour("48", "no stream is lost in a crowd", crowds),
)
