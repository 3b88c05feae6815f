"""Prompts that are only read: packed beside one another, in chunks, ended once; arithmetic by hand."""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
import types
from typing import Any

import numpy as np
import pytest
from counting_engine import make_engine
from counting_engine import request as counting_request

from jaxserve import messages
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.score_programs import EMBED, LOGPROBS, ScoreShape
from jaxserve.engine.scorer import Scorer
from jaxserve.errors import PromptTooLongError, RefusedError, RequestError
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, Score

VOCAB, PAGE, LONGEST = 50, 4, 40
TOP = np.arange(20)


class FakeRunner:
    """A hidden state is (token, position); a token's log-probability is minus itself."""

    page_size = PAGE
    kinds: tuple[str, ...] = (EMBED, LOGPROBS)
    shapes = tuple(
        ScoreShape(tokens=tokens, rows=3, pages_per_sequence=LONGEST // PAGE) for tokens in (8, 16)
    )

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.failing = False
        self.renewed = 0

    def renew(self) -> None:
        self.renewed += 1

    def run(self, kind: str, shape: ScoreShape, packed: Any) -> tuple[np.ndarray, ...]:
        if self.failing:
            raise ValueError("no device")
        start, fields = 0, {}
        for name, field in shape.layout.fields.items():
            fields[name] = packed[start : start + field.words].reshape(field.shape)
            start += field.words
        ends, lengths = fields["cu_q_lens"], fields["kv_lens"]
        rows = int((lengths > 0).sum())
        self.sizes.append((shape.tokens, rows))
        tables = [row[row > 0].tolist() for row in fields["block_tables"][:rows]]
        used = [page for table in tables for page in table]
        assert len(set(used)) == len(used), "two prompts share a page"
        if kind == LOGPROBS:
            values = -fields["targets"].astype(np.float32)
            tops = np.tile(TOP, (shape.tokens, 1))
            return values, tops, -tops.astype(np.float32)
        sums, last = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
        for row in range(rows):
            ids = fields["token_ids"][ends[row] : ends[row + 1]]
            places = np.arange(lengths[row] - len(ids), lengths[row])
            states = np.stack([ids, places], axis=1).astype(np.float32)
            sums[row], last[row] = states.sum(0), states[-1]
        return sums, last


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def scorer(runner: FakeRunner) -> Scorer:
    return Scorer(runner, max_model_len=LONGEST, vocab_size=VOCAB, max_queue_len=60)


def request(name: str, ids: list[int], score: Score = Score.MEAN) -> GenerationRequest:
    sampling = SamplingParams(logprobs=2)
    return GenerationRequest(request_id=name, prompt_ids=ids, sampling=sampling, score=score)


def drain(scorer: Scorer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while scorer.has_work:
        for output in scorer.step():
            assert output.request_id not in found
            found[output.request_id] = output
    return found


def test_any_mixture_is_read_right_and_every_page_comes_back(
    scorer: Scorer, runner: FakeRunner
) -> None:
    rng = random.Random(0)
    prompts = {
        str(number): [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 5, 16, 17, 40)))]
        for number in range(60)
    }
    scores = {name: rng.choice(list(Score)) for name in prompts}
    for name, ids in prompts.items():
        scorer.add(request(name, ids, scores[name]))
    found = drain(scorer)
    assert found.keys() == prompts.keys()
    for name, ids in prompts.items():
        output, score = found[name], scores[name]
        assert output.finish_reason is FinishReason.STOP
        if score is Score.LOGPROBS:
            assert [item.token_id for item in output.logprobs] == ids[1:]
            assert [item.logprob for item in output.logprobs] == [-float(i) for i in ids[1:]]
            assert all(item.top_ids == [0, 1] for item in output.logprobs)
            continue
        states = np.stack([ids, np.arange(len(ids))], axis=1)
        want = states[-1] if score is Score.LAST else states.mean(0)
        assert np.frombuffer(output.embedding, np.float32) == pytest.approx(want)
    assert len(scorer._free) == runner.shapes[0].num_pages - 1
    assert max(rows for _, rows in runner.sizes) == 3
    assert {tokens for tokens, _ in runner.sizes} == {8, 16}


def test_a_long_prompt_is_not_kept_waiting_by_short_ones(scorer: Scorer) -> None:
    scorer.add(request("first", [1] * 19))
    scorer.add(request("long", [1] * 40))
    finished: list[str] = []
    for number in range(25):
        scorer.add(request(f"{number}a", [1] * 19))
        scorer.add(request(f"{number}b", [1] * 19))
        finished += [output.request_id for output in scorer.step()]
    assert finished.index("long") < 8


def test_what_it_took_is_shared_and_tenants_take_turns(scorer: Scorer, runner: FakeRunner) -> None:
    for number in range(20):
        scorer.add(dataclasses.replace(request(f"a{number}", [1] * 16), tenant="a", trace=True))
    scorer.step()
    scorer.add(dataclasses.replace(request("b", [2] * 5), tenant="b"))
    order = []
    facts = {}
    while scorer.has_work:
        for output in scorer.step():
            order.append(output.request_id)
            facts[output.request_id] = output.facts
    assert order.index("b") <= 1
    assert all(fact is not None and fact.device_seconds > 0 for fact in facts.values())
    assert sum(fact.padding_tokens for fact in facts.values()) == pytest.approx(
        sum(tokens for tokens, _ in runner.sizes[1:]) - 19 * 16 - 5
    )
    assert sum(stretch.tokens for stretch in facts["a19"].stretches) == 16
    assert facts["b"].stretches == []


def test_abort(scorer: Scorer, runner: FakeRunner) -> None:
    ended: list[tuple[str, FinishReason]] = []
    scorer.on_end = lambda request, reason: ended.append((request.request_id, reason))
    scorer.add(request("a", [1] * 40))
    scorer.step()
    assert scorer.abort("a")
    assert not scorer.abort("a")
    assert ended == [("a", FinishReason.ABORT)]
    assert not scorer.has_work
    assert len(scorer._free) == runner.shapes[0].num_pages - 1


def test_a_failure_ends_what_was_read_and_not_what_waits(
    scorer: Scorer, runner: FakeRunner
) -> None:
    scorer.add(request("a", [1] * 40))
    scorer.add(request("b", [1] * 40))
    runner.failing = True
    (output,) = scorer.step()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert "no device" in (output.error or "")
    assert runner.renewed == 1
    runner.failing = False
    assert drain(scorer)["b"].finish_reason is FinishReason.STOP


def test_refusals(scorer: Scorer, runner: FakeRunner) -> None:
    for ids in ([], [-1], [VOCAB]):
        with pytest.raises(RequestError):
            scorer.add(request("a", ids))
    with pytest.raises(PromptTooLongError):
        scorer.add(request("a", [1] * 41))
    for number in range(60):
        scorer.add(request(str(number), [1]))
    with pytest.raises(RefusedError):
        scorer.add(request("a", [1]))
    runner.kinds = (LOGPROBS,)
    with pytest.raises(RequestError, match="--embeddings"):
        scorer.add(request("b", [1]))


class Link:
    """Keeps what is sent to workers, as it arrives there."""

    epoch = "now"

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[Any] = []
        self.status = types.SimpleNamespace(last_turn=0.0)

    def send(self, worker: bytes, message: Any) -> None:
        decoded = messages.decode_from_engine(messages.encode(message))
        assert isinstance(decoded, messages.StepOutputs)
        self.sent += decoded.outputs


def serve(scorer: Scorer | None, *asked: Any) -> tuple[list[Any], str]:
    """What the loop answers to these messages, and its metrics."""
    engine, _ = make_engine()
    link, stop = Link(), threading.Event()
    info = messages.EngineInfo("m", VOCAB, LONGEST, 20, PAGE, 64)
    loop = EngineLoop(engine, link, info, stop, scorer)  # type: ignore[arg-type]
    for message in asked:
        link.inbox.put((b"worker", message))
    loop._take_messages()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    loop.run()
    return link.sent, engine.metrics.text(engine.scheduler)


def test_the_loop_reads_prompts_beside_its_answers(scorer: Scorer) -> None:
    prompt = [3, 1, 2]
    sent, metrics = serve(
        scorer,
        messages.Submit(1, "now", request("a", prompt, Score.MEAN)),
        messages.Submit(2, "now", counting_request("b", [1, 2], max_tokens=2)),
        messages.Submit(3, "now", request("c", prompt, Score.LOGPROBS)),
        messages.Submit(4, "now", request("d", prompt)),
        messages.Abort([4]),
    )
    final = {output.rid: output for output in sent if output.finish_reason is not None}
    assert np.frombuffer(final[1].embedding, np.float32) == pytest.approx([2.0, 1.0])
    assert len([token for output in sent if output.rid == 2 for token in output.token_ids]) == 2
    assert [item.logprob for item in final[3].logprobs] == [-1.0, -2.0]
    assert not scorer.has_work
    name = 'vllm:request_success_total{finished_reason="abort",model_name='
    ended = [line.split()[-1] for line in metrics.splitlines() if line.startswith(name)]
    assert ended == ["1.0"]


def test_an_engine_that_was_not_started_for_it_names_the_flag() -> None:
    sent, _ = serve(
        None,
        messages.Submit(1, "now", request("a", [1])),
        messages.Submit(2, "now", request("a", [1], Score.LOGPROBS)),
    )
    embed, logprobs = sent
    assert (embed.status, "--embeddings" in embed.error) == (400, True)
    assert (logprobs.status, logprobs.param) == (400, "prompt_logprobs")
