"""Chat templates: the dialect, the messages' shape, refusals, and what a template may cost."""

from __future__ import annotations

import time
from typing import Any

import pytest

from checkpoints.reader import TokenizerFiles
from jaxserve.context.chat_template import ChatTemplate, load_chat_template
from jaxserve.errors import ModelFormatError, RequestError

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
)
USER = [{"role": "user", "content": "Hi <b>"}]


def render(source: str, messages: Any = USER, **extra: Any) -> str:
    return ChatTemplate(source, special={"bos_token": "<s>", "vocab_file": None}).render(
        messages, **extra
    )


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi <b><|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}x", "<s>x"),
        ("{{ {'a': '<é>&\"'} | tojson }}", '{"a": "<é>&\\""}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ f(2) }}", "<1><2>"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ tools is none }}{{ documents is none }}{{ missing is defined }}", "TrueTrueFalse"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        (
            "{{ 'a' ~ 1 ~ none }}{{ 'b' * 3 }}{{ '%s-%03d' % ('x', 7) }}{{ '{}!'.format(2) }}",
            "a1Nonebbbx-0072!",
        ),
        ("{{ '%s' | format(5) }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ [1] + [2] }}", "5323[1, 2]"),
    ],
)
def test_dialect(source: str, text: str) -> None:
    assert render(source) == text


def test_extra_variables_and_tools() -> None:
    source = "{% if enable_thinking %}T{% endif %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(source, tools=tools, enable_thinking=True) == "Tf"
    assert render(source, tools=[]) == ""


def test_parts_are_joined_unless_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert "user\na\nb<|im_end|>" in render(CHATML, messages)
    assert render(PARTS, messages) == "[a][b]"
    assert render(PARTS) == "Hi <b>"
    assert render(ONLY_PARTS, messages) == "[a][b]"
    assert render(ONLY_PARTS) == "[Hi <b>]"
    named = "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
    assert render(named, messages) == "ab"


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[1].tool_calls[0].function.arguments.x }}{{ messages[1].content is none }}"
    assert render(source, messages) == "éTrue"
    assert call["function"]["arguments"] == '{"x": "é"}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        (["hello"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], "with a role"),
        ([*USER, {"role": "user", "content": 3}], r"messages\[1\] has content of type int"),
        ([{"role": "user", "content": ["x"]}], "not an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a text"),
        (
            [{"role": "user", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments are not JSON",
        ),
    ],
)
def test_wrong_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(CHATML, messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "refuses the messages: roles must alternate",
        ),
        ("{{ a.b }}", "'a' is undefined"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "loop steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "loop steps",
        ),
        ("{{ 'a' * 10**12 }}", "1000000000000 characters"),
        ("{{ 10 ** 9999 }}", "39996 bits"),
        (
            "{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "bits",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "characters",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "characters",
        ),
        ("{% set x = 'ab' * 9999 %}{% for i in range(9999) %}{{ x }}{% endfor %}", "characters"),
        ("{{ '%999999d' % 1 }}", "huge width"),
        ("{{ '%*d' | format(999999, 1) }}", "huge width"),
        ("{{ '{:999999}'.format(1) }}", "huge width"),
        ("{{ 'a'.zfill(10**10) }}", "unsafe"),
        ("{{ {} | tojson(indent=10**10) }}", "indents JSON"),
    ],
)
def test_templates_that_refuse_fail_or_cost_too_much(source: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "source", ["{% if %}", "{% for x in y %}", "{{ 1 | no_such_filter }}", "{{ 'a' | center(9) }}"]
)
def test_what_is_not_a_template(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template cannot be read"):
        ChatTemplate(source, special={})


def test_budget_is_new_for_each_render() -> None:
    template = ChatTemplate("{% for i in range(9000) %}{% endfor %}ok", special={})
    assert [template.render(USER) for _ in range(60)] == ["ok"] * 60


def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": " Well, "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, messages, **options).endswith("<|im_start|>assistant\n Well, ")
    trimming = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(trimming, messages, **options) == "<Hi <b>><Well,"
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(RequestError, match="no text") as caught:
        render(CHATML, [{"role": "user", "content": " "}], **options)
    assert caught.value.param == "continue_final_message"


def test_a_model_may_have_no_template() -> None:
    assert load_chat_template(TokenizerFiles(tokenizer_json="{}")) is None
    files = TokenizerFiles(chat_template="{{ eos_token }}", special={"eos_token": "</s>"})
    template = load_chat_template(files)
    assert template is not None
    assert template.render(USER) == "</s>"
