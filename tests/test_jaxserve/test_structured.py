"""Grammars: what is refused, what random answers under their masks look like, and that none fails open."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import END, EOS, TURN, ByteTokenizer

from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured import grammars
from jaxserve.structured.check import GrammarChecker
from jaxserve.structured.matcher import Grammars, Matcher, MatcherPool
from jaxserve.structured.vocabulary import make_vocabulary

VOCAB = 300
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiled() -> Grammars:
    tokenizer = ByteTokenizer()
    return Grammars(lambda: make_vocabulary(tokenizer, VOCAB, tokenizer.eos_ids), VOCAB)


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.nonzero(bits)[0]]


def walk(matcher: Matcher, seed: int, limit: int = 400) -> tuple[str, bool]:
    """A random answer under the masks, and whether it ended by itself."""
    rng, data = random.Random(seed), bytearray()
    while not matcher.finished and len(data) < limit:
        assert matcher.error is None
        token = rng.choice(allowed(matcher))
        if token in (EOS, END):
            return data.decode(), True
        assert token < 256, "only bytes and end tokens are in answers"
        data.append(token)
        matcher.advance(token)
    return data.decode(errors="ignore"), matcher.finished


def valid_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and 1 <= len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"a", "b"}
    )


def test_random_answers_are_valid_for_their_schema(compiled: Grammars) -> None:
    grammar = grammars.schema_grammar(PERSON, "response_format")
    for seed in range(30):
        text, ended = walk(compiled.matcher(grammar), seed)
        assert ended
        assert valid_person(text), text


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (grammars.regex_grammar(r"^[a-c]{2,4}-\d$", "p"), r"[a-c]{2,4}-[0-9]"),
        (grammars.regex_grammar(r"a|b", "p"), r"a|b"),
        (grammars.choice_grammar(["yes", 'n"o\n', "möglich"], "p"), 'yes|n"o\n|möglich'),
        (grammars.text_grammar('start: "x" DIGIT+\nDIGIT: /[0-4]/', "p"), r"x[0-4]+"),
        (grammars.text_grammar('root ::= "x" [0-4]{1,3} | item\nitem ::= "y"', "p"), r"x[0-4]+|y"),
        (
            grammars.after_text(grammars.choice_grammar(["yes"], "p"), '"</t>"'),
            r"(?s:.*?)</t>[ \n]{0,4}yes",
        ),
    ],
)
def test_random_answers_match(compiled: Grammars, grammar: Grammar, pattern: str) -> None:
    for seed in range(8):
        text, ended = walk(compiled.matcher(grammar), seed)
        if ended:
            assert re.fullmatch(pattern, text, re.ASCII), text
        else:
            assert "</t>" in pattern, "only thinking may take that long"


def test_an_answer_after_thinking(compiled: Grammars) -> None:
    grammar = grammars.after_text(grammars.schema_grammar(PERSON, "p"), '"</think>"')
    matcher = compiled.matcher(grammar)
    for byte in b"so <b> is {odd}\xf0\x9f\x98\x80 <</think>":
        assert not {EOS, END} & set(allowed(matcher)), "no end before the answer"
        matcher.advance(byte)
        assert matcher.error is None
    assert set(allowed(matcher)) == {ord(" "), ord("\n"), ord("{")}


def test_thoughts_that_end_with_a_special_token(compiled: Grammars) -> None:
    grammar = grammars.after_text(
        grammars.choice_grammar(["yes"], "p"), f"<[{TURN}]>", opening='"<think>"'
    )
    assert set(allowed(compiled.matcher(grammar))) == {ord("<"), ord("y")}, "thoughts or none"
    matcher = compiled.matcher(grammar)
    for token in [*b"<think>a<b", TURN]:
        assert token in allowed(matcher)
        matcher.advance(token)
    assert set(allowed(matcher)) == {ord(" "), ord("\n"), ord("y")}


def test_the_end_token_only_where_the_answer_may_end(compiled: Grammars) -> None:
    matcher = compiled.matcher(grammars.regex_grammar("ab+", "p"))
    ends = []
    for byte in b"abb":
        ends.append({EOS, END} <= set(allowed(matcher)))
        matcher.advance(byte)
    assert [*ends, {EOS, END} <= set(allowed(matcher))] == [False, False, True, True]
    assert not matcher.finished
    done = compiled.matcher(grammars.choice_grammar(["a"], "p"))
    done.advance(ord("a"))
    assert done.finished


def test_white_space_is_bounded(compiled: Grammars) -> None:
    matcher = compiled.matcher(grammars.object_grammar("p"))
    taken = 0
    while taken < 100 and (byte := b"{\n\n"[taken] if taken < 3 else 32) in allowed(matcher):
        matcher.advance(byte)
        taken += 1
    assert 4 < taken < 60
    spaced = b'{ "a": {\n\n    "b": [1, 2],\n        "c": null } }'
    matcher = compiled.matcher(grammars.object_grammar("p"))
    for byte in spaced:
        assert byte in allowed(matcher)
        matcher.advance(byte)
    assert matcher.finished


def test_a_token_that_was_not_allowed_is_an_error_not_a_free_answer(compiled: Grammars) -> None:
    matcher = compiled.matcher(grammars.object_grammar("p"))
    matcher.advance(ord("x"))
    assert matcher.error is not None
    matcher.advance(ord("{"))
    assert matcher.error is not None
    assert not matcher.finished


def test_matchers_of_one_grammar_do_not_share_their_place(compiled: Grammars) -> None:
    grammar = grammars.choice_grammar(["ab", "cd", "ax"], "p")
    first, second = compiled.matcher(grammar), compiled.matcher(grammar)
    MatcherPool().advance([(first, ord("a")), (second, ord("c"))])
    assert allowed(first) == [ord("b"), ord("x")]
    assert allowed(second) == [ord("d")]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "minLenght": 3}, "minLenght"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "format": "foo"}, "foo"),
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "/$defs/b"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
        ({"enum": []}, "anyOf"),
        ({"properties": {"a": 5}}, "/properties/a"),
        (False, "false"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: Any, word: str) -> None:
    with pytest.raises(RequestError, match=re.escape(word)) as caught:
        checked(lambda: grammars.schema_grammar(schema, "response_format"))
    assert caught.value.param == "response_format"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars.regex_grammar("a(", "p"),
        lambda: grammars.regex_grammar(r"(a)\1", "p"),
        lambda: grammars.choice_grammar([], "p"),
        lambda: grammars.choice_grammar(["a", ""], "p"),
        lambda: grammars.text_grammar("start: nothing_here", "p"),
        lambda: grammars.text_grammar("what is this", "p"),
        lambda: grammars.text_grammar("start: a\na: a", "p"),
        lambda: grammars.text_grammar("root ::= " + "(" * 5000, "p"),
        lambda: grammars.text_grammar("start: <|no_such_token|>", "p"),
        lambda: grammars.text_grammar('start: %json {"x-guidance": {"lenient": true}}', "p"),
        lambda: grammars.regex_grammar("a" * 200_000, "p"),
    ],
)
def test_a_bad_grammar_is_refused(make: Any) -> None:
    with pytest.raises(RequestError) as caught:
        checked(make)
    assert caught.value.param == "p"


@pytest.mark.parametrize("pattern", ["((a{100}){100}){100}", "(a{1000}){1000}", "(x+x+)+y"])
def test_a_hostile_expression_costs_little(compiled: Grammars, pattern: str) -> None:
    started = time.monotonic()
    try:
        matcher = compiled.matcher(checked(lambda: grammars.regex_grammar(pattern, "p")))
        for _ in range(50):
            matcher.advance(ord("x"))
    except RequestError:
        pass
    assert time.monotonic() - started < 3.0


def test_an_ambiguous_grammar_ends_its_own_answer(compiled: Grammars) -> None:
    matcher = compiled.matcher(grammars.text_grammar('start: s\ns: s s s | s s | "a"', "p"))
    started = time.monotonic()
    for _ in range(3000):
        matcher.advance(ord("a"))
    assert matcher.error is not None
    assert time.monotonic() - started < 10.0


def checked(make: Any) -> Grammar:
    grammar: Grammar = make()
    GrammarChecker(ByteTokenizer()).check(grammar)
    return grammar
