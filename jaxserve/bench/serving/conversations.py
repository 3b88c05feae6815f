"""What is asked: seeded random prompts, a file's, and conversations (before step 1).

A conversation is a chain of turns: the next one is asked when the one before it is answered.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pathlib
import random
from typing import Any

from jaxserve.errors import UsageError

#: Below are special tokens in most vocabularies; a tiny one is used as it is.
LOWEST_ID = 100
#: One token each in most vocabularies, so that so many words are about as many tokens.
WORDS = (
    "the of and to in is that it was for on are as with they be at one have this from by hot but "
    "some what there we can out other were all your when up use word how said an each she which "
    "do their time if will way about many then them would write like so these her long make"
)


class Style(enum.Enum):
    """How prompts are written."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request. content: what is new in it: text or token ids, or ready messages (of a file)."""

    content: str | list[int] | list[dict[str, Any]]
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """system: the system message of a chat."""

    turns: list[Turn]
    system: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """In tokens; each is drawn evenly from within `range_ratio` of its value, as a share of it."""

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Input and output tokens of one request, at least 1 each."""
        return self._draw_one(rng, self.input_tokens), self._draw_one(rng, self.output_tokens)

    def _draw_one(self, rng: random.Random, middle: int) -> int:
        low = math.floor(middle * (1 - self.range_ratio))
        return max(1, rng.randint(low, math.ceil(middle * (1 + self.range_ratio))))


class Writer:
    """Makes random contents of a length, in one style."""

    def __init__(self, style: Style, vocab_size: int, seed: str) -> None:
        self.style = style
        self.rng = random.Random(seed)
        self._words = WORDS.split()
        self._ids = range(LOWEST_ID if vocab_size > 2 * LOWEST_ID else 0, vocab_size)

    def write(self, count: int) -> str | list[int]:
        """So many tokens, or words where the server takes text only."""
        if self.style is Style.IDS:
            return self.rng.choices(self._ids, k=count)
        return " ".join(self.rng.choices(self._words, k=count))


def make_random(count: int, lengths: Lengths, writer: Writer) -> list[Conversation]:
    """Single requests that have nothing in common."""
    conversations = []
    for _ in range(count):
        inputs, outputs = lengths.draw(writer.rng)
        turn = Turn(content=writer.write(inputs), output_tokens=outputs)
        conversations.append(Conversation(turns=[turn]))
    return conversations


def make_shared_prefix(
    count: int, lengths: Lengths, writer: Writer, *, prefix_tokens: int, num_prefixes: int
) -> list[Conversation]:
    """Single requests that begin with one of `num_prefixes` prefixes; in chats a system message."""
    prefixes = [writer.write(prefix_tokens) for _ in range(num_prefixes)]
    conversations = []
    for index in range(count):
        prefix = prefixes[index % num_prefixes]
        inputs, outputs = lengths.draw(writer.rng)
        content, system = writer.write(inputs), None
        if writer.style is Style.CHAT:
            system = str(prefix)
        elif isinstance(prefix, str):
            content = f"{prefix} {content}"
        else:
            content = [*prefix, *content]
        turn = Turn(content=content, output_tokens=outputs)
        conversations.append(Conversation(turns=[turn], system=system))
    return conversations


def make_multi_turn(
    count: int, lengths: Lengths, writer: Writer, *, turns: int
) -> list[Conversation]:
    """Conversations of `turns` requests, each with everything before it. Needs text or chats."""
    assert writer.style is not Style.IDS, "answers come back as text"
    conversations = []
    for _ in range(count):
        drawn = [lengths.draw(writer.rng) for _ in range(turns)]
        conversations.append(
            Conversation(
                turns=[Turn(content=writer.write(i), output_tokens=o) for i, o in drawn],
            )
        )
    return conversations


def read_file(
    path: pathlib.Path, count: int | None, output_tokens: int, style: Style
) -> list[Conversation]:
    """The first `count` lines: {"prompt": ...} or {"messages": [...]}, either with "max_tokens".

    prompt: text, or token ids for completions. Lines without max_tokens ask for `output_tokens`.
    Raises UsageError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:count]
    if len(filled) < (count or 1):
        wanted = "" if count is None else f", but --num-prompts is {count}"
        raise UsageError(f"{path} holds {len(filled)} requests{wanted}")
    turns = [
        _read_line(f"{path}, line {number}", line, output_tokens, style) for number, line in filled
    ]
    return [Conversation(turns=[turn]) for turn in turns]


def _read_line(where: str, line: str, output_tokens: int, style: Style) -> Turn:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    fields = value if isinstance(value, dict) else {}
    prompt, messages = fields.get("prompt"), fields.get("messages")
    wanted = fields.get("max_tokens", output_tokens)
    if type(wanted) is not int or wanted < 1:
        raise UsageError(f"{where}: max_tokens is {wanted!r}; it must be a number from 1 on")
    if isinstance(prompt, str) and prompt:
        return Turn(content=prompt, output_tokens=wanted)
    if style is Style.CHAT and _is_list_of(dict, messages):
        return Turn(content=messages or [], output_tokens=wanted)
    if style is not Style.CHAT and _is_list_of(int, prompt):
        return Turn(content=prompt or [], output_tokens=wanted)
    needed = "prompt or messages" if style is Style.CHAT else "prompt"
    raise UsageError(f"{where} has no {needed} that --endpoint could take")


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)
