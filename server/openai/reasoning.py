"""What a model thinks before it answers, apart from the answer (step 9).

Models of DeepSeek's and Qwen's kind write `<think>...</think>` first; the template of some opens the
block itself, so that their answers begin inside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxserve.context.chat_template import ChatTemplate
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer.protocol import Tokenizer

PARSERS = ("auto", "none", "deepseek")
OPEN, CLOSE = "<think>", "</think>"
#: Tokens of a prompt's end that may hold an opened block.
_TAIL = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """opened: the prompt's end has opened the block. done: it holds a whole one, so none follows."""

    opened: bool = False
    done: bool = False


def find_thinking(
    wanted: str, template: ChatTemplate | None, tokenizer: Tokenizer, prompt_ids: list[int]
) -> Thinking | None:
    """How an answer to this prompt thinks; None for a model that does not.

    wanted: one of PARSERS; auto asks the model's chat template.
    """
    if wanted == "none" or template is None:
        return None
    if wanted == "auto" and CLOSE not in template.source:
        return None
    tail = tokenizer.decode(prompt_ids[-_TAIL:], skip_special=False).rstrip()
    return Thinking(opened=tail.endswith(OPEN), done=tail.endswith(CLOSE))


class ThinkingReader:
    """Splits one answer's text into what was thought and the rest, as it comes.

    White space around the thoughts belongs to neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._inside = thinking.opened
        self._over = thinking.done
        self._begun = False  # something was shown of the present part
        self._thought = False  # a block has ended
        self._text = ""

    @property
    def has_thought(self) -> bool:
        """Whether a block has begun."""
        return self._inside or (self._over and self._thought)

    @property
    def is_over(self) -> bool:
        """Whether no thoughts will follow."""
        return self._over

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that may be shown now."""
        self._text += text
        if not self._inside and not self._over and not self._look_for_open():
            return "", ""
        thoughts = self._think() if self._inside else ""
        return thoughts, "" if self._inside else self._answer()

    def finish(self) -> tuple[str, str]:
        """What was held back; call once, at the end."""
        rest, self._text = self._text, ""
        return (rest.rstrip(), "") if self._inside else ("", rest)

    def _look_for_open(self) -> bool:
        """Whether it is known what the answer begins with."""
        rest = self._text.lstrip()
        if rest.startswith(OPEN):
            self._inside, self._text = True, rest[len(OPEN) :]
        elif OPEN.startswith(rest):
            return False
        else:
            self._over = self._begun = True
        return True

    def _think(self) -> str:
        if not self._begun:
            self._text = self._text.lstrip()
            self._text = self._text.removeprefix(OPEN).lstrip()
            if not self._text or OPEN.startswith(self._text):
                return ""
        at = self._text.find(CLOSE)
        if at >= 0:
            shown, self._text = self._text[:at].rstrip(), self._text[at + len(CLOSE) :]
            self._inside, self._over, self._begun = False, True, False
            self._thought = True
            return shown
        cut = len(self._text)
        for length in range(min(len(CLOSE) - 1, cut), 0, -1):
            if self._text.endswith(CLOSE[:length]):
                cut -= length
                break
        cut = len(self._text[:cut].rstrip())
        shown, self._text = self._text[:cut], self._text[cut:]
        self._begun |= bool(shown)
        return shown

    def _answer(self) -> str:
        if not self._begun:
            self._text = self._text.lstrip()
        shown, self._text = self._text, ""
        self._begun |= bool(shown)
        return shown


class ThoughtCounter:
    """Counts the tokens of one answer up to the end of its thoughts, markers included.

    That is what OpenAI's usage calls `reasoning_tokens`: they are part of `completion_tokens`. All
    tokens count where the answer ends within its thoughts, none where it has no thoughts.
    """

    def __init__(self, thinking: Thinking | None, tokenizer: Tokenizer) -> None:
        """thinking: None for a model that does not think, or whose thoughts nobody reads."""
        self.num_tokens = 0
        self._reader = None if thinking is None else ThinkingReader(thinking)
        self._text = IncrementalDetokenizer(tokenizer, skip_special=False)
        self._seen = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the answer, in whatever pieces."""
        if self._reader is None:
            return
        for token in token_ids:
            if self._reader.is_over:
                return
            self._seen += 1
            self._reader.push(self._text.push([token]))
            if self._reader.has_thought:
                self.num_tokens = self._seen
