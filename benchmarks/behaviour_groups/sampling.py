"""Seeds, penalties, biases and what else says how tokens are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from behaviour_groups.client import (
    COMPLETIONS,
    Answer,
    RefusedByNameError,
    Server,
    UntriedError,
    company,
    must,
    must_equal,
    refused_or_200,
    still_answers,
    text_of,
    together,
)
from behaviour_groups.listed import Behaviour

PROMPT = "Once upon a time there was a"
COUNTING = "one two three one two three one two three one two"
PEERS = ("Short", "The history of Rome begins with " * 12, "A list of colours: red, " * 3)


def choices_differ(server: Server) -> str:
    """n choices of one seed differ from one another, and the same set comes back."""
    fields: dict[str, Any] = {"n": 4, "seed": 5, "temperature": 1, "max_tokens": 16}
    first, second = (server.complete(PROMPT, **fields).choices for _ in range(2))
    texts = [text_of(choice) for choice in first]
    must(len(set(texts)) == 4, f"{len(set(texts))} different texts of 4")
    must(texts == [text_of(choice) for choice in second], "another set on repeat")
    return "4 different texts, twice the same"


def seeds_in_company(server: Server) -> str:
    """A seeded text alone equals that beside unseeded requests."""
    fields: dict[str, Any] = {"seed": 77, "temperature": 1, "max_tokens": 24}
    alone = server.complete(PROMPT, **fields).text
    must_equal(alone, server.complete(PROMPT, **fields).text, "on repeat, alone")
    with company(server, [f"{PROMPT} {i}" for i in range(6)], temperature=1, max_tokens=64):
        beside = server.complete(PROMPT, **fields).text
    must_equal(alone, beside, "beside six")
    return "the same 24 tokens alone and beside six"


def bad_logit_bias(server: Server) -> str:
    """Unknown and negative ids, keys that are no numbers, NaN: 400. Beyond -100 to 100: 400 or
    clipped, of which OpenAI says nothing."""
    cases = ['{"-1": 1}', '{"999999999": 1}', '{"abc": 1}', '{"5": NaN}', '{"5": "x"}']
    bad = []
    for case in [*cases, '{"5": 101}', '{"5": -1e9}']:
        body = json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=2, logit_bias=0))
        data = body.replace('"logit_bias": 0', f'"logit_bias": {case}').encode()
        status = server.call("POST", COMPLETIONS, data).status
        if status != 400 and (case in cases or status != 200):
            bad.append(f"{case} {status}")
    still_answers(server)
    must(not bad, ", ".join(bad))
    return "7 forms refused or clipped, fine afterwards"


def bad_repetition_penalty(server: Server) -> str:
    """repetition_penalty of 0, below 0 and NaN: 400; very large values work."""
    body = json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=4, repetition_penalty=-7))
    bad = []
    for value, wanted in (("0", 400), ("-1", 400), ("NaN", 400), ("100", 200), ("1e6", 200)):
        data = body.replace("-7", value).encode()
        status = server.call("POST", COMPLETIONS, data).status
        if status != wanted:
            bad.append(f"{value}: {status}")
    still_answers(server)
    must(not bad, ", ".join(bad))
    return "0, -1 and NaN refused; 100 and a million work"


def narrowed_to_greedy(server: Server) -> str:
    """min_p 1, top_k 1 and top_p near 0 equal greedy at any temperature, or choose a token that is
    just as likely."""
    greedy = server.complete(PROMPT, max_tokens=16, logprobs=3)
    for field, value in (("min_p", 1.0), ("top_k", 1), ("top_p", 1e-9)):
        for seed, temperature in ((1, 0.7), (2, 1.5), (3, 2.0)):
            asked = {"seed": seed, "temperature": temperature, field: value}
            answer = server.complete(PROMPT, max_tokens=16, logprobs=3, **asked)
            if not _ties(greedy, refused_or_200(answer, field)):
                where = f"{field} {value:g} at temperature {temperature:g}"
                must_equal(greedy.text, answer.text, where)
    return "3 fields at 3 temperatures"


def _ties(greedy: Answer, found: Answer) -> bool:
    """Whether the first token that differs is as likely as the greedy one."""
    wanted, other = (each.choices[0]["logprobs"]["tokens"] for each in (greedy, found))
    at = next((i for i, (a, b) in enumerate(zip(wanted, other, strict=False)) if a != b), None)
    if at is None:
        return False
    likely = greedy.choices[0]["logprobs"]["top_logprobs"][at]
    return bool(likely.get(other[at]) == likely[wanted[at]])


def fields_have_effect(server: Server) -> str:
    """Penalties, biases, bad words and the like change the answer as they say, or are refused."""
    plain = server.complete(COUNTING, max_tokens=24).text
    word = " three"
    token = server.tokens(word)[0]
    ask = _asker(server)
    effects: list[tuple[str, Any, Callable[[str], object]]] = [
        ("presence_penalty", 2, lambda text: text != plain),
        ("frequency_penalty", 2, lambda text: text != plain),
        ("repetition_penalty", 3.0, lambda text: text != plain),
        ("logit_bias", {str(token): 100}, lambda text: text == word * 24),
        ("bad_words", ["three"], lambda text: "three" not in text),
        ("allowed_token_ids", [token], lambda text: text == word * 24),
        ("stop_token_ids", [token], lambda text: len(text) < len(plain)),
    ]
    refused, without = [], []
    for field, value, right in effects:
        try:
            if not right(ask(field, **{field: value}).text):
                without.append(field)
        except RefusedByNameError:
            refused.append(field)
    for field, others in (("min_tokens", {}), ("ignore_eos", {"value": True})):
        try:
            if not _goes_on(server, field, others.get("value", 20)):
                without.append(field)
        except RefusedByNameError:
            refused.append(field)
    must("three" in plain, f"the model does not count: {plain!r}")
    must(not without, f"no effect: {', '.join(without)}")
    note = f"; refused: {', '.join(refused)}" if refused else ""
    return f"{len(effects) + 2 - len(refused)} fields{note}"


def _asker(server: Server) -> Callable[..., Any]:
    def ask(field: str, **fields: Any) -> Any:
        return refused_or_200(server.complete(COUNTING, max_tokens=24, **fields), field)

    return ask


def _goes_on(server: Server, field: str, value: Any) -> bool:
    """Whether a chat that ends early of itself becomes longer."""
    for question in ("What is the capital of France?", "What is 2+2?", "Hi"):
        short = server.chat(question, max_tokens=60).usage["completion_tokens"]
        if short < 20:
            break
    else:
        raise UntriedError("the model never ends early")
    answer = refused_or_200(server.chat(question, max_tokens=60, **{field: value}), field)
    longer: int = answer.usage["completion_tokens"]
    return longer == 60 if field == "ignore_eos" else longer >= value


def penalties_in_company(server: Server) -> str:
    """A penalised answer is the same beside shorter and longer peers, in any order."""
    fields: dict[str, Any] = {"max_tokens": 24, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    fields |= {"repetition_penalty": 1.2}
    alone = server.complete(COUNTING, **fields).text
    for peers in (PEERS, PEERS[::-1]):
        jobs = [lambda p=peer: server.complete(p, max_tokens=24) for peer in peers]
        jobs.insert(1, lambda: server.complete(COUNTING, **fields))
        text = together(jobs)[1].text
        must_equal(alone, text, "in company")
    return "the same 24 tokens alone and in two orders of peers"


def _repeating(server: Server) -> tuple[str, str]:
    """A prompt that holds its own next token many times, and that token. Raises UntriedError."""
    for words in (COUNTING, "red green blue red green blue red green"):
        prompt = words
        for _ in range(30):
            token = server.complete(prompt, max_tokens=1).text
            if len(token.strip()) > 2 and prompt.count(token) >= 10:
                return prompt, token
            prompt += token
    raise UntriedError("the model does not repeat itself")


def what_penalties_count(server: Server) -> str:
    """presence and frequency penalty count output only, repetition_penalty the prompt too."""
    prompt, first = _repeating(server)
    for field in ("presence_penalty", "frequency_penalty"):
        text = server.complete(prompt, max_tokens=1, **{field: 2}).text
        must(text == first, f"{field}: {text!r} for {first!r}, so the prompt was counted")
    answer = server.complete(prompt, max_tokens=1, repetition_penalty=100)
    text = refused_or_200(answer, "repetition_penalty").text
    must(text != first, "repetition_penalty does not count the prompt")
    return "the first token says so"


CHECKS = (
    Behaviour("9", "n choices of one seed differ, and come back", choices_differ),
    Behaviour("10", "a seed counts beside unseeded requests", seeds_in_company),
    Behaviour("23", "bad logit_bias: 400", bad_logit_bias),
    Behaviour("25", "bad repetition_penalty: 400; large ones work", bad_repetition_penalty),
    Behaviour("26", "min_p 1, top_k 1, top_p near 0 equal greedy", narrowed_to_greedy),
    Behaviour("26", "every sampling field has its effect", fields_have_effect),
    Behaviour("27", "penalties do not depend on the batch", penalties_in_company),
    Behaviour("28", "which tokens each penalty counts", what_penalties_count),
)
