"""Requests wait for their grammar beside the step loop and come back through the inbox."""

from __future__ import annotations

import queue
import threading

from byte_tokenizer import ByteTokenizer
from counting_engine import VOCAB, expected, make_engine

from jaxserve.engine.grammar_compiler import GrammarCompiler
from jaxserve.engine.link import Compiled, EngineStatus
from jaxserve.engine.loop import EngineLoop
from jaxserve.messages import EngineInfo, Output, StepOutputs, Submit
from jaxserve.request import GenerationRequest, Grammar, SamplingParams
from jaxserve.structured import grammars
from jaxserve.structured.matcher import Grammars
from jaxserve.structured.vocabulary import make_vocabulary


def submit(rid: int, grammar: Grammar | None) -> Submit:
    request = GenerationRequest(
        request_id="", prompt_ids=[1], sampling=SamplingParams(), grammar=grammar
    )
    return Submit(rid, "epoch", request)


def test_new_grammars_wait_and_known_ones_do_not() -> None:
    tokenizer = ByteTokenizer()
    known = Grammars(lambda: make_vocabulary(tokenizer, 260, tokenizer.eos_ids), 260)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    compiler = GrammarCompiler(known, inbox)
    good, bad = grammars.regex_grammar("a+", "p"), Grammar(text="{", param="p")
    assert not compiler.takes(b"w", submit(1, None))
    assert compiler.takes(b"w", submit(2, good))
    assert compiler.takes(b"w", submit(3, bad))
    assert compiler.takes(b"w", submit(4, grammars.regex_grammar("b+", "p")))
    compiler.drop(b"w", 4)
    back = {}
    for _ in range(3):
        worker, message = inbox.get(timeout=20)
        assert isinstance(message, Compiled)
        back[message.submit.rid] = compiler.gives_back(worker, message.submit)
    assert back == {2: True, 3: True, 4: False}
    assert not compiler.takes(b"w", submit(5, good)), "compiled by now"
    assert not compiler.takes(b"w", submit(6, bad)), "its error is known: the engine tells it"


def test_what_a_worker_that_left_had_is_dropped() -> None:
    tokenizer = ByteTokenizer()
    known = Grammars(lambda: make_vocabulary(tokenizer, 260, tokenizer.eos_ids), 260)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    compiler = GrammarCompiler(known, inbox)
    assert compiler.takes(b"gone", submit(1, grammars.regex_grammar("c+", "p")))
    assert compiler.takes(b"here", submit(1, grammars.regex_grammar("d+", "p")))
    compiler.drop(b"gone")
    back = {}
    for _ in range(2):
        worker, message = inbox.get(timeout=20)
        back[worker] = compiler.gives_back(worker, message.submit)
    assert back == {b"gone": False, b"here": True}


class FakeLink:
    """What the loop needs of `EngineLink`; `sent` holds every output by rid."""

    epoch = "epoch"

    def __init__(self, stop: threading.Event, wanted: set[int]) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.status = EngineStatus()
        self.sent: dict[int, list[Output]] = {}
        self._stop, self._wanted = stop, wanted

    def send(self, worker: bytes, message: StepOutputs) -> None:
        for output in message.outputs:
            self.sent.setdefault(output.rid, []).append(output)
        ended = {rid for rid, outputs in self.sent.items() if outputs[-1].finish_reason}
        if ended >= self._wanted:
            self._stop.set()


def test_the_loop_compiles_beside_its_steps_and_errors_stay_apart() -> None:
    """The counting device knows no masks, so a constrained answer must end with an error."""
    engine, _ = make_engine()
    tokenizer = ByteTokenizer()
    engine.grammars = Grammars(lambda: make_vocabulary(tokenizer, 260, tokenizer.eos_ids), 260)
    stop = threading.Event()
    link = FakeLink(stop, {1, 2, 3})
    info = EngineInfo("x", VOCAB, 100, 20, 4, 64)
    loop = EngineLoop(engine, link, info, stop)  # type: ignore[arg-type]
    for rid, grammar in (
        (1, None),
        (2, grammars.choice_grammar(["yes"], "p")),
        (3, Grammar(text='{"grammars": [{"lark_grammar": "start: x"}]}', param="guided_grammar")),
    ):
        request = GenerationRequest(
            request_id="",
            prompt_ids=[5, 6, 7],
            sampling=SamplingParams(max_tokens=30, ignore_eos=True),
            grammar=grammar,
        )
        link.inbox.put((b"w", Submit(rid, "epoch", request)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    free = [token for output in link.sent[1] for token in output.token_ids]
    assert free == expected([5, 6, 7], 30)
    assert link.sent[2][0].finish_reason is None, "it was taken"
    assert "grammar" in (link.sent[2][-1].error or "")
    assert (link.sent[3][0].status, link.sent[3][0].param) == (400, "guided_grammar")
    assert len(link.sent[3]) == 1
