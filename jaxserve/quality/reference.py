"""What a model says in float32: read from a file, or found by running it (before step 1).

A file holds values of an independent implementation: `prompts`, each with `ids`, `positions`
(`pos`, `top10_ids`, `top10_logprobs`) and `greedy` (`ids`, `near_tie_steps`), and in `meta` the
`sha256` of the weights that it was made from. Must not know how anything is stored or computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence

from jaxserve.errors import UsageError
from jaxserve.llm import LLM
from jaxserve.quality.texts import CHATS, TEXTS
from jaxserve.request import SamplingParams, TokenLogprobs

#: Two likeliest tokens closer than this (nat) are a near-tie: other rounding may choose the other.
NEAR_TIE = 0.05
TOP = 10
NUM_GREEDY = 48
#: Places inside a prompt that are compared, beside all places of its continuation.
NUM_INSIDE = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The likeliest tokens after the first `length` ids of a prompt and its continuation."""

    length: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptReference:
    """One prompt, its greedy continuation, the near-ties among its steps, and points to compare."""

    name: str
    ids: tuple[int, ...]
    greedy_ids: tuple[int, ...]
    near_ties: frozenset[int]
    points: tuple[Point, ...]

    def prefix(self, length: int) -> list[int]:
        """The first `length` ids of prompt and continuation."""
        return [*self.ids, *self.greedy_ids][:length]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """All prompts; origin says in words where the values come from."""

    origin: str
    prompts: tuple[PromptReference, ...]


def read_reference(path: pathlib.Path, model: pathlib.Path) -> Reference:
    """The reference for the weights in `model`: of a file, or of the one in a folder that fits.

    Raises UsageError if none was made from these weights.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    digest = _sha256(model) if model.is_file() else ""
    for file in files:
        try:
            found = json.loads(file.read_bytes())
            if found["meta"].get("sha256") == digest:
                return Reference(origin=file.name, prompts=_read_prompts(found["prompts"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if path.is_dir() and not isinstance(error, OSError):
                continue  # some other file
            raise UsageError(f"--golden: {file} cannot be read: {error!r}") from None
    raise UsageError(
        f"--golden: no file in {path} was made from {model} (sha256 {digest or 'of a folder'}); "
        "leave it out to compare with float32 of this engine"
    )


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_prompts(found: Sequence[dict[str, object]]) -> tuple[PromptReference, ...]:
    return tuple(_read_prompt(item) for item in found if "greedy" in item)


def _read_prompt(item: dict[str, object]) -> PromptReference:
    greedy, positions, ids = item["greedy"], item["positions"], item["ids"]
    assert isinstance(greedy, dict)
    assert isinstance(positions, list)
    assert isinstance(ids, list)
    return PromptReference(
        name=str(item["name"]),
        ids=tuple(ids),
        greedy_ids=tuple(greedy["ids"]),
        near_ties=frozenset(greedy["near_tie_steps"]),
        points=tuple(
            Point(
                length=each["pos"] + 1,
                ids=tuple(each["top10_ids"]),
                logprobs=tuple(each["top10_logprobs"]),
            )
            for each in positions
        ),
    )


def make_reference(llm: LLM, *, num_greedy: int = NUM_GREEDY) -> Reference:
    """What a float32 model says itself, of this package's texts."""
    prompts = {name: tuple(llm.text_prompt(text)) for name, text in TEXTS.items()}
    if llm.has_chat_template:
        prompts |= {name: tuple(llm.chat_prompt(messages)) for name, messages in CHATS.items()}
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=TOP, max_tokens=num_greedy)
    answers = llm.generate([list(ids) for ids in prompts.values()], greedy)
    inside = [_inside(ids) for ids in prompts.values()]
    prefixes = [
        list(ids[:length])
        for ids, lengths in zip(prompts.values(), inside, strict=True)
        for length in lengths
    ]
    one = dataclasses.replace(greedy, max_tokens=1)
    before = iter(llm.generate(prefixes, one))
    found = []
    for (name, ids), lengths, answer in zip(prompts.items(), inside, answers, strict=True):
        steps = answer.logprobs or []
        points = [
            _point(length, (other.logprobs or [])[0])
            for length, other in zip(lengths, itertools.islice(before, len(lengths)), strict=True)
        ]
        points += [_point(len(ids) + step, item) for step, item in enumerate(steps)]
        ties = (
            step
            for step, item in enumerate(steps)
            if item.top_logprobs[0] - item.top_logprobs[1] < NEAR_TIE
        )
        found.append(
            PromptReference(
                name=name,
                ids=ids,
                greedy_ids=tuple(answer.token_ids),
                near_ties=frozenset(ties),
                points=tuple(points),
            )
        )
    return Reference(origin="float32 of this engine", prompts=tuple(found))


def _inside(ids: tuple[int, ...]) -> list[int]:
    """Lengths of prefixes, spread over a prompt, shorter than it."""
    return sorted(
        {max(1, len(ids) * part // (NUM_INSIDE + 1)) for part in range(1, NUM_INSIDE + 1)}
    )


def _point(length: int, item: TokenLogprobs) -> Point:
    return Point(length=length, ids=tuple(item.top_ids), logprobs=tuple(item.top_logprobs))
