"""The model's own chat template: messages to one prompt text (step 1).

Knows Jinja and the shape of messages; knows no tokens and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from checkpoints.reader import TokenizerFiles
from jaxserve.context.message_content import Message, prepare_messages
from jaxserve.context.sandbox import (
    MAX_CHARACTERS,
    TemplateEnvironment,
    TemplateRefusalError,
    with_budget,
)
from jaxserve.errors import ModelFormatError, RequestError


class ChatTemplate:
    """A compiled template. Thread-safe.

    source: Jinja text. special: bos_token, eos_token and so on, which templates use by name (as
        in tokenizer_config.json; entries that are no texts are left out).
    Raises ModelFormatError if `source` is not Jinja.
    """

    def __init__(self, source: str, *, special: Mapping[str, Any]) -> None:
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFormatError(
                f"the model's chat template cannot be read: {error.message} (line {error.lineno})"
            ) from None
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise ModelFormatError(f"the model's chat template cannot be read: {error}") from None
        self._special = {
            key: value
            for key, value in special.items()
            if key.endswith("_token") and isinstance(value, str)
        }
        #: The template's text, and whether it shows tools to the model.
        self.source = source
        self.takes_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self._takes_parts = _loops_over_content(tree)
        self._takes_text = not self._takes_parts or _tests_for_string(tree)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages as this template wants them; see `message_content.prepare_messages`."""
        return prepare_messages(
            messages, takes_parts=self._takes_parts, takes_text=self._takes_text
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt's text.

        add_generation_prompt: end with what introduces the assistant's answer.
        continue_final_message: end inside the last message, for the model to go on with it.
        extra: more variables for the template (`enable_thinking`, `documents` ...).
        Raises RequestError (param "messages") if the template refuses the messages or fails.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        prepared = self.prepare(messages)
        text = self._run(
            {
                "documents": None,
                **self._special,
                **extra,
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_after(text, prepared[-1]) if continue_final_message else text

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(with_budget(variables)):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise RequestError(
                        f"the chat template makes more than {MAX_CHARACTERS} characters",
                        param="messages",
                    )
        except RequestError:
            raise
        except TemplateRefusalError as error:
            raise _refused(f"the model's chat template refuses the messages: {error}") from None
        except Exception as error:  # whatever foreign code may raise
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise _refused(f"the model's chat template failed: {kind}{error}") from None
        return "".join(pieces)


def load_chat_template(files: TokenizerFiles) -> ChatTemplate | None:
    """The template that came with the tokeniser, None if there is none (a base model)."""
    if files.chat_template is None:
        return None
    return ChatTemplate(files.chat_template, special=files.special)


def _refused(message: str) -> RequestError:
    return RequestError(" ".join(message.split()), param="messages")


def _cut_after(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of the last message's own text (with its spaces, if they are there)."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    content = str(content or "")
    stripped = content.strip()
    at = text.rfind(stripped) if stripped else -1
    if at < 0:
        raise RequestError(
            "continue_final_message: the last message has no text in the prompt to go on with",
            param="continue_final_message",
        )
    whole = content.lstrip()
    end = at + (len(whole) if text.startswith(whole, at) else len(stripped))
    return text[:end]


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps behind filters or a `set` name."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
    return False


def _content_names(tree: nodes.Template) -> set[str]:
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return names


def _loops_over_content(tree: nodes.Template) -> bool:
    names = _content_names(tree)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _tests_for_string(tree: nodes.Template) -> bool:
    names = _content_names(tree)
    return any(
        test.name in ("string", "iterable", "sequence", "mapping") and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )
