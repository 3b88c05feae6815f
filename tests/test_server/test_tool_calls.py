"""Calls of tools and thoughts in answers: read whole and in any pieces, forced by grammars, refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from app_alone import events, post
from byte_tokenizer import EOS, ByteTokenizer
from fake_client import FakeClient
from hypothesis import example, given, settings

from jaxserve.config import TOOL_PARSERS, EngineConfig, ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.request import Grammar
from jaxserve.structured.grammars import after_text
from jaxserve.structured.matcher import Grammars
from jaxserve.structured.vocabulary import make_vocabulary
from server.app import create_app
from server.openai.reasoning import Thinking
from server.openai.tools import ToolsAsked
from server.openai.tools_formats import FORMATS
from server.openai.tools_grammars import forced_calls, free_calls
from server.openai.tools_message import MessageStyle, join_deltas

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>name, arguments</tool_call>{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
THINKER = TEMPLATE + "{% if think %}<think>\n{% endif %}{# </think> #}"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMES = frozenset({"weather", "now"})
#: Stands for a special token's text, spelt by other tokens.
TURN_AS_TEXT = "(turn)"
HERMES_TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "O\\"}slo{", "days": 1}}\n'
    '</tool_call>\n<tool_call>{"name":"now","arguments":{}}</tool_call>'
)
TWO = [("weather", {"city": 'O"}slo{', "days": 1}), ("now", {})]
#: convention -> (answer, its content, its calls)
ANSWERS: dict[str, list[tuple[str, str | None, list[tuple[str, Any]]]]] = {
    "hermes": [
        (HERMES_TWO, "Let me see.", TWO),
        ("just a < text <tool_ca", "just a < text <tool_ca", []),
        (
            '<tool_call>{"arguments": {"a": [1]}, "name": "now"}</tool_call>',
            None,
            [("now", {"a": [1]})],
        ),
        ('<tool_call>{"name": "nope", "arguments": {}}</tool_call>', None, []),
        ("<tool_call>no json</tool_call> and on", "<tool_call>no json</tool_call> and on", []),
        ('<tool_call>{"name": "now", "arg', '<tool_call>{"name": "now", "arg', []),
        ("  text with spaces \n", "  text with spaces \n", []),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "x"}}', None, [("weather", {"city": "x"})]),
        (
            '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
            '{"name": "weather", "parameters": {"city": "{"}}',
            None,
            [("now", {}), ("weather", {"city": "{"})],
        ),
        ('{"a": 1} is JSON', '{"a": 1} is JSON', []),
        ('Hello {"name": "now", "parameters": {}}', 'Hello {"name": "now", "parameters": {}}', []),
    ],
    "pythonic": [
        (
            '[weather(city="a]\\"b", days=[1, {"x": None}], ok=true), now()]',
            None,
            [("weather", {"city": 'a]"b', "days": [1, {"x": None}], "ok": True}), ("now", {})],
        ),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("[now(__import__)]", "[now(__import__)]", []),
        ("[nope()]", "[nope()]", []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "]"}}, '
            '{"name": "now", "arguments": {}}]',
            None,
            [("weather", {"city": "]"}), ("now", {})],
        ),
        ("Hi [TOOL", "Hi [TOOL", []),
    ],
    "mistral_args": [
        (
            '[TOOL_CALLS]weather[ARGS]{"city": "a"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
            None,
            [("weather", {"city": "a"}), ("now", {})],
        ),
    ],
    "gemma": [
        (
            '<|tool_call>call:weather{city:<|"|>O, {slo}<|"|>,days:2,list:[1,<|"|>b<|"|>],in:{x:true}}'
            "<tool_call|><|tool_call>call:now{}<tool_call|>",
            None,
            [
                ("weather", {"city": "O, {slo}", "days": 2, "list": [1, "b"], "in": {"x": True}}),
                ("now", {}),
            ],
        ),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
            None,
            [("weather", {"city": "Oslo"})],
        ),
    ],
}
CASES = [(name, *case) for name, cases in ANSWERS.items() for case in cases]


def read(style: MessageStyle, text: str, cuts: list[int]) -> dict[str, Any]:
    """The message of `text` in pieces, without the calls' ids, which are random."""
    reader, deltas, start = style.reader(), [], 0
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        deltas += reader.push(text[start:cut], last=False)
        start = cut
    message = join_deltas([*deltas, *reader.push("", last=True)])
    for call in message.get("tool_calls", ()):
        assert call.pop("id")
    return message


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    message = read(MessageStyle(tools=FORMATS[name], names=NAMES), text, [])
    found = [call["function"] for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    if calls or content is not None:
        assert message["content"] == content
    else:
        assert message["content"] == text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "gemma", "pythonic"])
def test_without_parallel_calls_the_first_one_counts(name: str) -> None:
    text, calls = next((text, calls) for text, _, calls in ANSWERS[name] if len(calls) == 2)
    message = read(MessageStyle(tools=FORMATS[name], names=NAMES, parallel=False), text, [])
    assert [call["function"]["name"] for call in message["tool_calls"]] == [calls[0][0]]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == calls[0][1]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=30), st.booleans())
@example(CASES[0], list(range(300)), True)
def test_any_pieces_join_to_the_same_message(
    case: tuple[str, str, Any, Any], cuts: list[int], parallel: bool
) -> None:
    style = MessageStyle(tools=FORMATS[case[0]], names=NAMES, parallel=parallel)
    assert read(style, case[1], cuts) == read(style, case[1], [])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', "{", "}", '"'),
                *("\\", "x", " ", "\n", "<", "<think>", "</think>", '{"a": 1}', "}}", "now", ";"),
            ]
        ),
        max_size=14,
    ).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(["hermes", "llama3_json"]),
    st.sampled_from([None, Thinking(), Thinking(opened=True), Thinking(done=True)]),
)
def test_any_pieces_of_odd_text_join_to_the_same_message(
    text: str, cuts: list[int], name: str, thinking: Thinking | None
) -> None:
    style = MessageStyle(tools=FORMATS[name], names=NAMES, thinking=thinking)
    assert read(style, text, cuts) == read(style, text, [])


@pytest.mark.parametrize("cuts", [[], list(range(100))])
@pytest.mark.parametrize(
    ("thinking", "text", "thoughts", "content"),
    [
        (Thinking(), "<think>\nso it is\n</think>\n\nYes.", "so it is", "Yes."),
        (
            Thinking(opened=True),
            "so <b> it is</think>Yes. </think>",
            "so <b> it is",
            "Yes. </think>",
        ),
        (Thinking(opened=True), "<think>so</think>Yes", "so", "Yes"),
        (Thinking(done=True), "\n\nYes <think>", None, "Yes <think>"),
        (Thinking(), "No thoughts.", None, "No thoughts."),
        (Thinking(), "<think>cut off </thi", "cut off </thi", ""),
    ],
)
def test_thoughts_are_apart(
    thinking: Thinking, text: str, thoughts: str | None, content: str, cuts: list[int]
) -> None:
    message = read(MessageStyle(thinking=thinking), text, cuts)
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_forced_calls_are_valid_whatever_the_model_wants(name: str, choice: str) -> None:
    """Random answers under the grammar, read back as the server reads them."""
    tokenizer = ByteTokenizer()
    compiled = Grammars(lambda: make_vocabulary(tokenizer, 260, tokenizer.eos_ids), 260)
    tools = [
        {"type": "function", "function": {"parameters": {}, **tool["function"]}} for tool in TOOLS
    ]
    asked = ToolsAsked(tools=tools, choice=choice, parallel=True, named=choice == "weather")
    form = asked.format(FORMATS[name])
    grammar = forced_calls(asked, FORMATS[name], tokenizer)
    style = MessageStyle(tools=form, names=asked.names)
    for seed in range(4):
        text = random_answer(compiled, grammar, seed)
        message = read(style, text, [])
        assert message["content"] is None, text
        calls = [call["function"] for call in message["tool_calls"]]
        assert len(calls) == 1 or choice == "required"
        for call in calls:
            arguments = json.loads(call["arguments"])
            if call["name"] == "weather":
                assert list(arguments) == ["city", "days"]
                assert arguments["days"] in (1, 2)
                assert len(arguments["city"]) <= 5
            else:
                assert choice == "required"


STRICT = [
    {"type": "function", "function": {"parameters": {}, **tool["function"]}} for tool in TOOLS
]
OPENED = dataclasses.replace(  # with an opening that is a token of its own
    FORMATS["hermes"],
    opening="<turn>",
    call=FORMATS["hermes"].call.replace("<tool_call>", "<turn>"),
)
GOOD = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
BAD = GOOD.replace("2", "3")
HERMES_GOOD, HERMES_BAD = (f"<tool_call>\n{call}\n</tool_call>" for call in (GOOD, BAD))
LLAMA_GOOD, LLAMA_BAD = (call.replace("arguments", "parameters") for call in (GOOD, BAD))
NOW = '{"name": "now", "arguments": {"z": [1]}}'
#: convention -> answers that may be, and answers that may not, with weather strict and now not.
STRICT_ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        [
            *("", "Just text, 1 < 2 <tool_ca", HERMES_GOOD, f"Let me see.\n{HERMES_GOOD}"),
            f"{HERMES_GOOD}\n<tool_call>\n{NOW}\n</tool_call> That is all <tool",
        ],
        [
            *(HERMES_BAD, f"Hm {HERMES_BAD}", f"{HERMES_GOOD} {HERMES_BAD}", "<tool_call>x"),
            *(f"<tool_call>{GOOD}", "<tool_call>", HERMES_GOOD.replace("weather", "nope")),
        ],
    ),
    "llama3_json": (
        [
            *("", "Hello {", " \n text", LLAMA_GOOD, f"<|python_tag|>{LLAMA_GOOD}"),
            LLAMA_GOOD + "; " + NOW.replace("arguments", "parameters"),
        ],
        [
            *(LLAMA_BAD, f" {LLAMA_GOOD}", f"\x1c{LLAMA_BAD}", "{", '{"a": 1} is JSON'),
            *("<|python_tag|>text", f" <|python_tag|>{LLAMA_BAD}", f"{LLAMA_GOOD}; {LLAMA_BAD}"),
        ],
    ),
    "mistral": (
        ["", "Hi [TOOL", f"[TOOL_CALLS][{GOOD}]", f"So: [TOOL_CALLS][{GOOD}, {NOW}]"],
        [f"[TOOL_CALLS][{BAD}]", f"Hi [TOOL_CALLS][{NOW}, {BAD}]", "[TOOL_CALLS]x"],
    ),
    "mistral_args": (
        ["Hi", '[TOOL_CALLS]weather[ARGS]{"city": "a", "days": 1}[TOOL_CALLS]now[ARGS]{"b": {}}'],
        ['[TOOL_CALLS]weather[ARGS]{"city": "a"}', "x[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]nope[A"],
    ),
    "opened": (
        ["", "text", HERMES_GOOD.replace("<tool_call>", "<turn>") + " and"],
        [HERMES_BAD.replace("<tool_call>", "<turn>"), f"{TURN_AS_TEXT}x"],
    ),
}


def free(name: str, *, parallel: bool = True, not_first: str = "") -> tuple[Grammars, Grammar]:
    """What holds the strict weather and the free now, where calls are optional."""
    tokenizer = ByteTokenizer()
    asked = ToolsAsked(
        tools=STRICT, choice="auto", parallel=parallel, strict=frozenset({"weather"})
    )
    form = OPENED if name == "opened" else FORMATS[name]
    compiled = Grammars(lambda: make_vocabulary(tokenizer, 260, tokenizer.eos_ids), 260)
    return compiled, free_calls(asked, form, tokenizer, not_first=not_first)


def may_be(compiled: Grammars, grammar: Grammar, text: str) -> bool:
    """Whether an answer of this text may come, and may end."""
    matcher = compiled.matcher(grammar)
    plain = text.replace(TURN_AS_TEXT, "\0")
    ids = ByteTokenizer().encode(plain, parse_special=True, add_bos=False)
    turn = list(b"<turn>")
    for token in [part for each in ids for part in (turn if each == 0 else [each])]:
        if matcher.finished or not _allowed(matcher, token):
            return False
        matcher.advance(token)
    return matcher.finished or _allowed(matcher, EOS)


def _allowed(matcher: Any, token: int) -> bool:
    return bool(matcher.mask[token // 32] >> (token % 32) & 1)


@pytest.mark.parametrize("name", sorted(STRICT_ANSWERS))
def test_strict_tools_are_held_where_calls_are_optional(name: str) -> None:
    compiled, grammar = free(name)
    good, bad = STRICT_ANSWERS[name]
    assert [text for text in good if not may_be(compiled, grammar, text)] == []
    assert [text for text in bad if may_be(compiled, grammar, text)] == []


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_args"])
def test_strict_tools_are_held_after_thoughts(name: str) -> None:
    """Thoughts are never taken for text that an unheld call could follow."""
    compiled, grammar = free(name, not_first="<think>")
    grammar = after_text(grammar, '"</think>"', opening='"<think>"')
    good, bad = STRICT_ANSWERS[name]
    for lead in ("", "<think>a</think>", " <think>a</think>"):
        held = [text for text in bad if may_be(compiled, grammar, lead + text)]
        # white space between thoughts and a call is no part of either
        assert [text for text in held if text.strip() not in good] == []
    for lead in ("", "<think>a</think>"):
        assert [text for text in good if not may_be(compiled, grammar, lead + text)] == []


def test_the_grammar_of_a_request_keeps_thoughts_from_being_text() -> None:
    client = FakeClient()
    web = make_web(client, THINKER, tool_parser="llama3_json")
    function = {"name": "weather", "parameters": CITY, "strict": True}
    tools = [{"type": "function", "function": function}]
    assert post(web, CHAT, say("x", tools=tools)).status_code == 200
    grammar = client.requests[-1].grammar
    assert grammar is not None
    compiled, _ = free("llama3_json")
    assert may_be(compiled, grammar, f"<think>a</think>{LLAMA_GOOD}")
    assert not may_be(compiled, grammar, f"<think>a</think>{LLAMA_BAD}")


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("hermes", HERMES_GOOD, HERMES_GOOD + HERMES_GOOD),
        ("llama3_json", LLAMA_GOOD, f"{LLAMA_GOOD}; {LLAMA_GOOD}"),
        ("mistral", f"[TOOL_CALLS][{GOOD}]", f"[TOOL_CALLS][{GOOD}, {GOOD}]"),
    ],
)
def test_one_strict_call_where_they_may_not_be_parallel(name: str, one: str, two: str) -> None:
    compiled, grammar = free(name, parallel=False)
    assert may_be(compiled, grammar, one)
    assert not may_be(compiled, grammar, two)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_args"])
def test_whatever_is_read_as_a_strict_call_is_valid(name: str) -> None:
    """Random answers after an opening, read back as the server reads them."""
    compiled, grammar = free(name)
    style = MessageStyle(tools=FORMATS[name], names=NAMES)
    for seed in range(4):
        text = random_answer(compiled, grammar, seed, FORMATS[name].opening or "{")
        for call in read(style, text, [])["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict), text
            if call["function"]["name"] == "weather":
                assert list(arguments) == ["city", "days"]
                assert arguments["days"] in (1, 2)


def test_strict_tools_of_requests() -> None:
    client = FakeClient()
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": "required"}, {"tools": TOOLS}):
        answer = post(make_web(client), CHAT, say(HERMES_TWO, **{"tools": strict, **fields}))
        assert answer.status_code == 200, answer.text
    optional, none, required, loose = (request.grammar for request in client.requests)
    assert optional is not None
    assert "TEXT" in optional.text
    assert (none, loose) == (None, None)
    assert required is not None
    assert "TEXT" not in required.text
    thinking = say("x", tools=strict, chat_template_kwargs={"think": True})
    assert post(make_web(client, THINKER), CHAT, thinking).status_code == 200
    thoughtful = client.requests[-1].grammar
    assert thoughtful is not None
    assert "</think>" in thoughtful.text


def test_what_cannot_be_strict_is_refused_by_name() -> None:
    strict = {"name": "f", "parameters": {"not": {}}, "strict": True}
    tools = [{"type": "function", "function": strict}]
    for parser, word in (("hermes", "not"), ("gemma", "strict"), ("pythonic", "strict")):
        client = FakeClient()
        answer = post(make_web(client, tool_parser=parser), CHAT, say("x", tools=tools))
        error = answer.get_json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools"), error
        assert word in error["message"]
        assert client.requests == []


def random_answer(compiled: Grammars, grammar: Grammar, seed: int, begun: str = "") -> str:
    """begun: what it begins with."""
    rng, matcher, data = random.Random(seed), compiled.matcher(grammar), bytearray(begun.encode())
    for token in data:
        matcher.advance(token)
    while not matcher.finished:
        assert matcher.error is None
        bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.nonzero(bits)[0]]
        ends = EOS in allowed
        plain = [token for token in allowed if 32 <= token < 127] or allowed
        quote = [token for token in plain if token in (34, 125)]
        token = EOS if ends else rng.choice(quote if quote and rng.random() < 0.4 else plain)
        if token == EOS:
            break
        data.append(token)
        matcher.advance(token)
    return data.decode()


def make_web(client: FakeClient, template: str = TEMPLATE, **config: Any) -> Any:
    client.info = msgspec.structs.replace(client.info, max_model_len=4000)
    app = create_app(
        client,  # type: ignore[arg-type]
        ByteTokenizer(),
        ChatTemplate(template, special={}),
        EngineConfig(model="fake"),
        ServerConfig(**config),
    )
    return app.test_client()


def say(text: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"@say:{text}@"}
    return {"messages": [message], "tools": TOOLS, "max_tokens": 400, **fields}


def test_whole_and_streamed_answers_hold_the_same_calls() -> None:
    web = make_web(FakeClient())
    whole = post(web, CHAT, say(HERMES_TWO)).get_json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see."
    stream = events(post(web, CHAT, say(HERMES_TWO, stream=True)))
    assert stream[-1][1] == "[DONE]"
    chunks = [data["choices"][0] for _, data in stream[:-1]]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]
    joined = join_deltas([chunk["delta"] for chunk in chunks])
    for message in (joined, whole["message"]):
        calls = [
            (c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in message["tool_calls"]
        ]
        assert calls == TWO
    starts = [c["delta"]["tool_calls"][0] for c in chunks if c["delta"].get("tool_calls")]
    assert [s["index"] for s in starts if "id" in s] == [0, 1]
    assert len({s["id"] for s in starts if "id" in s}) == 2


def test_a_cut_call_says_length() -> None:
    choice = post(make_web(FakeClient()), CHAT, say(HERMES_TWO, max_tokens=75)).get_json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_tools_are_shown_and_history_is_taken() -> None:
    client = FakeClient()
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"z": 1}'}}
    body = say("ok")
    body["messages"][:0] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert post(make_web(client), CHAT, body).status_code == 200
    prompt = ByteTokenizer().decode(client.requests[0].prompt_ids, skip_special=False)
    assert '"name": "weather"' in prompt
    assert '{"z": 1}<end><turn>tool\nnoon' in prompt


def test_the_settings_know_the_same_formats() -> None:
    assert {"auto", "none", *FORMATS} == set(TOOL_PARSERS)


def test_choices_of_tools() -> None:
    client = FakeClient()
    web = make_web(client)
    for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "now"}}):
        answer = post(web, CHAT, say(HERMES_TWO, tool_choice=choice))
        assert answer.status_code == 200, answer.text
    auto, none, required, named = client.requests
    assert auto.grammar is None
    assert none.grammar is None
    assert b"weather" not in bytes(i for i in none.prompt_ids if i < 256).split(b"@say")[0]
    assert required.grammar is not None
    assert "weather" in required.grammar.text
    assert named.grammar is not None
    assert "weather" not in named.grammar.text


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "more than once"),
        ({"tool_choice": "sometimes"}, "tool_choice", "auto"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the tools",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
            },
            "tools",
            "not",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_said(fields: dict[str, Any], param: str, word: str) -> None:
    answer = post(make_web(FakeClient()), CHAT, say("x", **fields))
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert word in error["message"]


def test_a_model_without_tools_refuses_them_by_name() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    answer = post(make_web(FakeClient(), plain), CHAT, say("x"))
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "tools")
    answer = post(make_web(FakeClient(), tool_parser="none"), CHAT, say("x"))
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_in_answers(think: bool, stream: bool) -> None:
    client = FakeClient()
    text = ("" if think else "<think>\n") + "let me see\n</think>\n\nNoon."
    body = say(text, chat_template_kwargs={"think": think}, tools=None, stream=stream)
    answer = post(make_web(client, THINKER), CHAT, body)
    if stream:
        chunks = [data for _, data in events(answer)[:-1]]
        message = join_deltas([chunk["choices"][0]["delta"] for chunk in chunks])
    else:
        message = answer.get_json()["choices"][0]["message"]
    assert message["reasoning_content"] == "let me see"
    assert message["content"] == "Noon."
    off = post(make_web(client, THINKER, reasoning_parser="none"), CHAT, {**body, "stream": False})
    assert "</think>" in off.get_json()["choices"][0]["message"]["content"]


def test_a_form_holds_after_the_thoughts_only() -> None:
    client = FakeClient()
    web = make_web(client, THINKER)
    form = {"structured_outputs": {"choice": ["yes"]}, "tools": None}
    for think in (True, False):
        body = say("x", chat_template_kwargs={"think": think}, **form)
        assert post(web, CHAT, body).status_code == 200
    opened, free = (request.grammar for request in client.requests)
    assert opened is not None
    assert free is not None
    assert "</think>" in opened.text
    assert "<think>" not in opened.text
    assert "<think>" in free.text


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("text", "think", "max_tokens", "thoughts"),
    [
        ("<think>\nlet me see\n</think>\n\nNoon.", False, 400, 27),
        ("let me see\n</think>\n\nNoon.", True, 400, 19),
        (" <think>cut off", False, 12, 12),
        (" <thin air", False, 400, 0),
        ("Noon. <think>no</think>", False, 400, 0),
    ],
)
def test_thoughts_are_counted(
    text: str, think: bool, max_tokens: int, thoughts: int, n: int
) -> None:
    """A byte is a token here: all up to the end of the closing marker."""
    body = say(text, chat_template_kwargs={"think": think}, tools=None, n=n, max_tokens=max_tokens)
    usage = post(make_web(FakeClient(), THINKER), CHAT, body).get_json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": n * thoughts}
    assert usage["completion_tokens"] == n * min(len(text) + 1, max_tokens)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert events(post(make_web(FakeClient(), THINKER), CHAT, streamed))[-2][1]["usage"] == usage
    off = post(make_web(FakeClient(), THINKER, reasoning_parser="none"), CHAT, body).get_json()
    assert off["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
