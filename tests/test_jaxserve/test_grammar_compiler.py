"""Requests wait for their grammar beside the step loop and come back through the inbox."""

from __future__ import annotations

import queue

from byte_tokenizer import ByteTokenizer

from jaxserve.engine.grammar_compiler import GrammarCompiler
from jaxserve.engine.link import Compiled
from jaxserve.messages import Submit
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
