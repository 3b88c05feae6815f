"""Which tokens may come next in an answer of a given form (step 7), on the host.

A `Matcher` never fails open: when it cannot say what may follow, it has an `error`, and the engine
ends that answer, and no other, with it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured.limits import MAX_EXTRA_SECONDS, USUAL_SECONDS, parser_limits

#: Answers from which on masks are computed in threads.
_SEVERAL = 4


class Matcher:
    """One answer's place in its grammar. One thread at a time.

    mask: [ceil(V / 32)] uint32, bit v % 32 of word v // 32 set where token v may come next; an end
    token where the answer may end. finished: the answer is complete and nothing can follow.
    error: why there is no telling what may follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.mask: npt.NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), np.uint32)
        self.finished = False
        self.error: str | None = None
        self._matcher = matcher
        self._seconds_left = MAX_EXTRA_SECONDS
        self._compute()

    def advance(self, token: int) -> None:
        """The answer goes on with `token`."""
        if self.error is None and not self.finished:
            self._matcher.consume_token(token)
            self._compute()

    def _compute(self) -> None:
        started = time.monotonic()
        matcher = self._matcher
        if not matcher.is_error():
            self.finished = matcher.is_stopped()
            matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if matcher.is_error():
            first = matcher.get_error().splitlines()[0]
            self.error = f"the answer's grammar cannot be followed any further: {first}"
        elif not self.mask.any():
            self.error = "the answer's grammar allows no token of this model"
        self._seconds_left -= max(0.0, time.monotonic() - started - USUAL_SECONDS)
        if self._seconds_left < 0 and self.error is None:
            self.error = "the answer's grammar takes too long; simplify it"


class Grammars:
    """Compiles grammars for one model, each once while it is in use. Thread-safe.

    make_vocabulary: called by `prepare`, or when the first grammar comes. vocab_size: V, that of the logits.
    """

    def __init__(
        self, make_vocabulary: Callable[[], LLTokenizer], vocab_size: int, *, kept: int = 64
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocab_size = vocab_size
        self._kept = kept
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: collections.OrderedDict[str, LLMatcher | RequestError] = (
            collections.OrderedDict()
        )

    def prepare(self) -> None:
        """Loads the vocabulary now; waits where that is being done already."""
        with contextlib.suppress(RequestError):  # whoever asks for a grammar gets the reason
            self._words()

    def ready(self, grammar: Grammar) -> bool:
        """Whether `matcher` would return at once."""
        with self._lock:
            return grammar.text in self._compiled

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of an answer. Raises RequestError.

        A new grammar takes milliseconds, a huge one seconds, the first one of all
        as long as the vocabulary; without the interpreter's lock, mostly.
        """
        with self._lock:
            known = self._compiled.get(grammar.text)
            if isinstance(known, RequestError):
                raise known
            if known is not None:
                self._compiled.move_to_end(grammar.text)
                return Matcher(known.deep_copy(), self._vocab_size)
        compiled = LLMatcher(self._words(), grammar.text, log_level=0, limits=parser_limits())
        first = Matcher(compiled.deep_copy(), self._vocab_size)
        if first.error is None:
            self._keep(grammar, compiled)
            return first
        error = RequestError(f"{grammar.param}: {first.error}", param=grammar.param)
        self._keep(grammar, error)
        raise error

    def _keep(self, grammar: Grammar, result: LLMatcher | RequestError) -> None:
        with self._lock:
            self._compiled[grammar.text] = result
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)

    def _words(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary


class MatcherPool:
    """Advances matchers, many of them in threads: llguidance works without the interpreter's lock."""

    def __init__(self) -> None:
        threads = max(1, min(8, (os.cpu_count() or 1) // 2))
        self._pool = (
            concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="grammar")
            if threads > 1
            else None
        )

    def advance(self, moves: Sequence[tuple[Matcher, int]]) -> None:
        """Every matcher with its token."""
        if self._pool is None or len(moves) < _SEVERAL:
            for matcher, token in moves:
                matcher.advance(token)
            return
        for done in [self._pool.submit(matcher.advance, token) for matcher, token in moves]:
            done.result()
