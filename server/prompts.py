"""Prompts for the routes (steps 1 and 2): bounded in size, and never in the way of open streams.

A long prompt is rendered and tokenised wherever the application says (in a thread, where the
tokeniser lets go of the interpreter's lock); short ones are not worth the detour.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxserve.context.assemble import assemble_chat, assemble_completion
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.request import Grammar
from jaxserve.routing.limits import TOO_LONG
from jaxserve.structured.check import GrammarChecker
from jaxserve.tokenizer.protocol import Tokenizer

#: Bytes of text up to which a prompt is tokenised at once, in well under a millisecond.
INLINE_BYTES = 8192

Result = TypeVar("Result")


def run_here(assemble: Callable[[], Any]) -> Any:
    """For a process in which nobody waits meanwhile."""
    return assemble()


class Prompts:
    """Makes prompt ids.

    max_bytes: longest text of one request, in UTF-8 bytes. run_long: calls its argument, the work
    of a long prompt, and returns what that returns. mark: told when which step was done, in seconds
    of `time.monotonic()`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_bytes: int,
        run_long: Callable[[Callable[[], Any]], Any] = run_here,
        mark: Callable[[str, float], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self._max_bytes = max_bytes
        self._run_long = run_long
        self._mark = mark
        self._grammars = GrammarChecker(tokenizer)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """The prompt of a chat; without a word about it, it ends where the assistant begins.

        tools: what the template shows to the model. keep_last: how many tokens to keep from the
        end. Raises RequestError.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        size = sum(_size(message.get("content")) for message in messages)
        size += len(json.dumps(tools)) if tools else 0

        rendered: list[float] = []

        def assemble() -> list[int]:
            return assemble_chat(
                self._tokenizer,
                self.template,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_arguments=template_kwargs,
                on_rendered=lambda: rendered.append(time.monotonic()),
            )

        ids = _keep(self._run(assemble, size, "messages"), keep_last)
        self._note("context_assembled", *rendered)
        self._note("tokenised", time.monotonic())
        return ids

    def texts(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_bos: bool | None = None,
        keep_last: int | None = None,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Prompts that are whole as they are: texts or token ids. Raises RequestError.

        param: the field that holds them.
        """
        size = sum(_size(prompt) for prompt in prompts if isinstance(prompt, str))

        def assemble() -> list[list[int]]:
            return [
                assemble_completion(self._tokenizer, prompt, add_bos=add_bos) for prompt in prompts
            ]

        try:
            found = [_keep(ids, keep_last) for ids in self._run(assemble, size, param)]
            self._note("tokenised", time.monotonic())
            return found
        except RequestError as error:
            error.param = param if error.param == "prompt" else error.param
            raise

    def check_grammar(self, grammar: Grammar) -> None:
        """Raises RequestError naming the field where the grammar cannot be enforced."""
        if not self._grammars.knows(grammar):
            self._elsewhere(lambda: self._grammars.check(grammar))

    def _note(self, step: str, *moments: float) -> None:
        if self._mark is not None:
            for moment in moments:
                self._mark(step, moment)

    def _run(self, assemble: Callable[[], Result], size: int, param: str) -> Result:
        if size > self._max_bytes:
            raise PromptTooLongError(
                f"the prompt's text has {size} bytes; this server takes at most {self._max_bytes}",
                param=param,
                code=TOO_LONG,
            )
        if size <= INLINE_BYTES:
            return assemble()
        return self._elsewhere(assemble)

    def _elsewhere(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, or raises. Gevent's threads log an exception that leaves them with
        its traceback, which a client's mistake is not worth."""

        def settle() -> tuple[Result | None, RequestError | None]:
            try:
                return work(), None
            except RequestError as error:
                return None, error

        result, error = self._run_long(settle)
        if error is not None:
            raise error
        return cast(Result, result)


def _size(content: Any) -> int:
    """UTF-8 bytes of a message's content."""
    if isinstance(content, str):
        return len(content.encode("utf-8", "surrogatepass"))
    if isinstance(content, list):
        return sum(_size(part.get("text")) for part in content)
    return 0


def _keep(ids: list[int], keep_last: int | None) -> list[int]:
    if keep_last is None:
        return ids
    if keep_last < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep_last}; it must be at least 1",
            param="truncate_prompt_tokens",
        )
    return ids[-keep_last:]
