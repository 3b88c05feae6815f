"""`jaxserve quality` against a model that is a table: every figure can be worked out by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UsageError
from jaxserve.llm import Job
from jaxserve.quality.measure import Quality, measure
from jaxserve.quality.reference import Reference, make_reference, read_reference
from jaxserve.quality.report import to_json, to_text
from jaxserve.request import FinishReason, RequestOutput, TokenLogprobs

VOCAB = 40


class TableModel:
    """The next token's logits depend on the last token only: `table` [VOCAB, VOCAB]."""

    has_chat_template = False

    def __init__(self, table: np.ndarray) -> None:
        shifted = table - table.max(1, keepdims=True)
        self.logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        memory, mesh = types.SimpleNamespace(weights=1000), types.SimpleNamespace(size=2)
        self.report = types.SimpleNamespace(weights="table", memory=memory, mesh=mesh)

    def text_prompt(self, text: str) -> list[int]:
        return [byte % VOCAB for byte in text.encode()]

    def generate(self, prompts: list[list[int]], sampling: Any) -> list[RequestOutput]:
        jobs = [Job(key=n, prompt_ids=ids, sampling=sampling) for n, ids in enumerate(prompts)]
        return [answer for _, answer in self.run(jobs)]

    def run(self, jobs: Iterable[Job[Any]]) -> Iterator[tuple[Any, RequestOutput]]:
        for job in jobs:
            items, last = [], job.prompt_ids[-1]
            for _ in range(job.sampling.max_tokens):
                row = self.logprobs[last]
                biased = row.copy()
                for token, bias in job.sampling.logit_bias.items():
                    biased[token] += bias
                last = int(biased.argmax())
                top = np.argsort(-row)[: job.sampling.logprobs]
                items.append(
                    TokenLogprobs(
                        token_id=last,
                        logprob=float(row[last]),
                        top_ids=top.tolist(),
                        top_logprobs=row[top].tolist(),
                    )
                )
            yield (
                job.key,
                RequestOutput(
                    request_id="",
                    text="",
                    token_ids=[item.token_id for item in items],
                    num_prompt_tokens=len(job.prompt_ids),
                    logprobs=items,
                    finish_reason=FinishReason.LENGTH,
                ),
            )


TABLE = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)) * 3


def compare(model: TableModel, reference: Reference) -> Quality:
    calls: list[tuple[int, int]] = []
    found = measure(model, reference, "int9", lambda done, of: calls.append((done, of)))  # type: ignore[arg-type]
    assert calls[-1][0] == calls[-1][1]
    return found


@pytest.fixture
def reference() -> Reference:
    return make_reference(TableModel(TABLE), num_greedy=12)  # type: ignore[arg-type]


def test_a_model_is_as_good_as_itself(reference: Reference) -> None:
    found = compare(TableModel(TABLE), reference)
    assert found.rms == found.worst == 0.0
    assert found.is_within
    assert found.weight_bytes == 2000
    assert all(each.steps == each.steps_equal for each in found.prompts)


def test_deviations_are_those_of_the_log_probabilities(reference: Reference) -> None:
    """Every second of the likeliest tokens moves so far down that it is not among them any more."""
    other = TableModel(TABLE)
    moved = other.logprobs.copy()
    for row in moved:
        row[np.argsort(-row)[1:10:2]] -= 30.0
    other.logprobs = moved
    found = compare(other, reference)
    assert found.worst == pytest.approx(30.0)
    assert found.rms == pytest.approx(math.sqrt(30.0**2 / 2))
    assert not found.is_within
    assert all(each.continues_equally for each in found.prompts)


def test_another_likeliest_token_is_seen_but_not_at_near_ties(reference: Reference) -> None:
    prompt = next(each for each in reference.prompts if len(set(each.greedy_ids)) > 3)
    step = 2
    table = TABLE.copy()
    before = prompt.greedy_ids[step - 1]
    first, second = np.argsort(-table[before])[:2]
    table[before, [first, second]] = table[before, [second, first]]
    found = compare(TableModel(table), dataclasses.replace(reference, prompts=(prompt,)))
    (judged,) = found.prompts
    assert judged.first_difference is not None
    assert judged.steps_equal < judged.steps
    assert not judged.continues_equally
    at = judged.first_difference
    tie = dataclasses.replace(prompt, near_ties=frozenset({at}))
    found = compare(TableModel(table), dataclasses.replace(reference, prompts=(tie,)))
    assert found.prompts[0].continues_equally


def test_reports_name_every_scheme_and_prompt(reference: Reference) -> None:
    found = [compare(TableModel(TABLE), reference)]
    text = to_text("the model", reference, found)
    assert "the model, against float32 of this engine" in text
    assert all(each.name in text for each in reference.prompts)
    told = json.loads(json.dumps(to_json("the model", reference, found)))
    assert told["schemes"][0]["good"] is True
    assert len(told["schemes"][0]["prompts"]) == len(reference.prompts)


def test_a_file_of_values_is_found_by_the_weights(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    position = {"pos": 1, "top10_ids": [4, 5], "top10_logprobs": [-0.5, -1.5]}
    greedy = {"ids": [4, 6], "near_tie_steps": [1]}
    prompts = [
        {"name": "p", "ids": [1, 2], "positions": [position], "greedy": greedy},
        {"name": "no continuation", "ids": [1], "positions": []},
    ]
    values = {"meta": {"sha256": hashlib.sha256(b"weights").hexdigest()}, "prompts": prompts}
    folder = tmp_path / "values"
    folder.mkdir()
    (folder / "a.json").write_text('{"other": 1}')
    (folder / "b.json").write_text(json.dumps(values))
    found = read_reference(folder, model)
    assert found.origin == "b.json"
    (prompt,) = found.prompts
    assert (prompt.ids, prompt.greedy_ids, prompt.near_ties) == ((1, 2), (4, 6), {1})
    assert prompt.prefix(prompt.points[0].length) == [1, 2]
    model.write_bytes(b"other weights")
    with pytest.raises(UsageError, match=r"no file in .* was made from"):
        read_reference(folder, model)
