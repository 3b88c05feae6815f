"""Streams: stop strings, characters, finish reasons, choices, usage and frames."""

from __future__ import annotations

import itertools
import json
from typing import Any

from behaviour_groups.client import CHAT, COMPLETIONS, ROUTES, Server, UntriedError, must, text_of
from behaviour_groups.listed import Behaviour

STORY = "What is the capital of France, and what can one see there?"
LONG = {COMPLETIONS: "Once upon a time there was a", CHAT: STORY}
EMOJI = "\U0001f389\U0001f30d\U0001f680 " * 6
HANGUL = "안녕하세요 세계 " * 5
MARK = "�"


def _text(server: Server, route: str, length: int) -> str:
    """An answer with enough of it to stop in. Raises UntriedError."""
    text = server.ask(route, LONG[route], max_tokens=length).text
    if len(text) < 3 * length // 2:
        raise UntriedError(f"{route}: the model says no more than {text!r}")
    return text


def stop_strings(server: Server) -> str:
    """A stop string that spans tokens: whole and streamed text end right before it."""
    seen = []
    for route in ROUTES:
        full = _text(server, route, 48)
        for length in (3, 8, 15):
            stop = full[len(full) // 2 :][:length]
            wanted = full[: full.index(stop)]
            whole = server.ask(route, LONG[route], max_tokens=48, stop=[stop])
            must(whole.text == wanted, f"{route} whole: {whole.text[-20:]!r}, stop {stop!r}")
            must(whole.finish == "stop", f"{route} whole: finish_reason {whole.finish}")
            stream = server.stream(route, LONG[route], max_tokens=48, stop=[stop]).whole()
            must(stream.text() == wanted, f"{route} streamed {stream.text()[-20:]!r} at {stop!r}")
            must(stream.finishes() == ["stop"], f"{route} streamed: {stream.finishes()}")
            seen.append(stop)
    return f"{len(seen)} stop strings of 3 to 15 characters, none shown"


def no_empty_chunks(server: Server) -> str:
    """With a stop string set every content piece has text, and what was held back comes."""
    count = 0
    for route in ROUTES:
        full = _text(server, route, 24)
        for stop in (full[-3:] + "zzz", "zzzzzzzzzzzz", full[5:9] + "QQ"):
            stream = server.stream(route, LONG[route], max_tokens=24, stop=[stop]).whole()
            must(stream.text() == full, f"{route}: {stream.text()[-20:]!r} for {full[-20:]!r}")
            empty = [
                piece
                for _, piece in stream.pieces
                if not text_of(piece)
                and not piece["finish_reason"]
                and not (piece.get("delta") or {}).get("role")
            ]
            must(not empty, f"{route}: {len(empty)} of {len(stream.pieces)} chunks are empty")
            count += len(stream.pieces)
    return f"{count} chunks, none empty"


def empty_stop(server: Server) -> str:
    """An empty stop string, alone or in a list, gets a 400 that names stop."""
    cases = list(itertools.product(ROUTES, ("", [""], ["a", ""]), (False, True)))
    bad = []
    for route, stop, stream in cases:
        answer = server.ask(route, STORY, max_tokens=3, stop=stop, stream=stream)
        if answer.status != 400 or not answer.names("stop"):
            bad.append(f"{stop!r} {answer.status}")
    must(not bad, f"{len(bad)} of {len(cases)}: {', '.join(sorted(set(bad)))}")
    return f"{len(cases)} forms, 400 each"


def characters(server: Server) -> str:
    """Characters of several tokens come whole; text for n tokens begins text for n + 1."""
    num_wide = 0
    for prompt in (EMOJI, HANGUL):
        stream = server.stream(COMPLETIONS, prompt, max_tokens=40).whole()
        text = stream.text()
        num_wide += sum(ord(letter) > 0x2000 for letter in text)
        for _, piece in stream.pieces[:-2]:
            must(MARK not in text_of(piece), f"U+FFFD in a chunk: {text_of(piece)!r}")
        must(MARK not in text.rstrip(MARK), f"U+FFFD inside the text: {text!r}")
        texts = [server.complete(prompt, max_tokens=n).text for n in range(1, 14)]
        for shorter, longer in itertools.pairwise(texts):
            cut = shorter.removesuffix(MARK)
            must(MARK not in cut, f"U+FFFD not only at the end: {shorter!r}")
            must(longer.startswith(cut), f"{shorter!r} does not begin {longer!r}")
    if not num_wide:
        raise UntriedError("the model wrote no such characters")
    return f"{num_wide} emoji and Hangul whole"


def one_finish(server: Server) -> str:
    """Exactly one finish_reason, on the choice's last chunk, then [DONE], for any max_tokens."""
    lengths = (1, 2, 3, 7, 17)
    for route, length in itertools.product(ROUTES, lengths):
        stream = server.stream(route, STORY, max_tokens=length).whole()
        must(len(stream.finishes()) == 1, f"{route}, {length} tokens: {stream.finishes()}")
        last = stream.pieces[-1][1]["finish_reason"]
        must(last, f"{route}, {length} tokens: none on the last chunk")
    return f"{len(lengths)} lengths on both routes"


def choices_of_streams(server: Server) -> str:
    """Each index has its role, its text and one finish; its text is the whole answer's."""
    fields: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1, "max_tokens": 16}
    for route in ROUTES:
        whole = server.ask(route, STORY, **fields).choices
        stream = server.stream(route, STORY, **fields).whole()
        must(len(whole) == 3, f"{route}: {len(whole)} choices")
        for choice in whole:
            index = choice["index"]
            must(len(stream.finishes(index)) == 1, f"{route}: {index} has {stream.finishes(index)}")
            must(stream.text(index) == text_of(choice), f"{route}: text of {index} differs")
            roles = [
                p["delta"].get("role") for i, p in stream.pieces if i == index and "delta" in p
            ]
            must(route == COMPLETIONS or roles[0] == "assistant", f"{route}: role {roles[:2]}")
    return "3 choices on both routes, as in the whole answer"


def usage_only_if_asked(server: Server) -> str:
    """No usage unless include_usage is true; then on one last chunk without choices."""
    for route in ROUTES:
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            stream = server.stream(route, STORY, max_tokens=3, **options).whole()
            must(not stream.usages, f"{route} {options}: usage comes")
        server_takes = server.stream(route, STORY, max_tokens=3, stream_options={})
        must(server_takes.status == 200 and not server_takes.usages, f"{route}: options {{}}")
        asked = server.stream(route, STORY, max_tokens=3, stream_options={"include_usage": True})
        must(len(asked.whole().usages) == 1, f"{route}: {len(asked.usages)} chunks with usage")
        last = asked.chunks[-1]
        must(last.get("usage") and last["choices"] == [], f"{route}: last chunk {str(last)[:80]}")
    return "absent, null, {}, false and true"


def usage_adds_up(server: Server) -> str:
    """prompt + completion = total, as in the whole answer; n choices count the prompt once."""
    for route in ROUTES:
        counts = {}
        for n in (1, 3):
            fields: dict[str, Any] = {"n": n, "seed": 3, "temperature": 1, "max_tokens": 9}
            whole = server.ask(route, STORY, **fields).usage
            options = {"include_usage": True}
            stream = server.stream(route, STORY, stream_options=options, **fields).whole()
            last = stream.usages[-1]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                must(
                    last[name] == whole[name], f"{route}, n {n}: {name} {last[name]}, {whole[name]}"
                )
            total = whole["prompt_tokens"] + whole["completion_tokens"]
            must(total == whole["total_tokens"], f"{route}: {whole}")
            counts[n] = whole["prompt_tokens"]
        must(counts[1] == counts[3], f"{route}: prompt {counts[3]} for n 3, {counts[1]} for 1")
    return "n 1 and 3 on both routes"


def frames(server: Server) -> str:
    """`data: {json}`, LF only, one object a frame, [DONE] last; one id, created, model, object."""
    for route in ROUTES:
        options = {"include_usage": True}
        stream = server.stream(route, STORY, max_tokens=6, stream_options=options).whole()
        must(b"\r" not in stream.raw, f"{route}: CR in a stream")
        parts = stream.raw.decode().split("\n\n")
        must(parts[-2:] == ["data: [DONE]", ""], f"{route}: ends with {parts[-2:]}")
        for part in parts[:-2]:
            must(part.startswith("data: ") and "\n" not in part, f"{route}: frame {part[:60]!r}")
            json.loads(part.removeprefix("data: "))
        for name in ("id", "created", "model", "object"):
            found = {chunk.get(name) for chunk in stream.chunks}
            must(len(found) == 1 and None not in found, f"{route}: {name} is {found}")
    return f"{CHAT} and {COMPLETIONS}"


CHECKS = (
    Behaviour("1", "the start of a stop string is never shown", stop_strings),
    Behaviour("3", "no empty chunks with a stop string; held-back text comes", no_empty_chunks),
    Behaviour("4", "an empty stop string gets a 400", empty_stop),
    Behaviour("6", "emoji and Hangul come whole", characters),
    Behaviour("7", "one finish_reason, on the last chunk", one_finish),
    Behaviour("8", "n > 1 streamed: each index as in the whole answer", choices_of_streams),
    Behaviour("33", "usage in streams only if asked for", usage_only_if_asked),
    Behaviour("34", "usage adds up, the prompt counted once", usage_adds_up),
    Behaviour("framing", "frames of a stream, one id", frames),
)
