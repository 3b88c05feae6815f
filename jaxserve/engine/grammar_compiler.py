"""Compiles new grammars beside the step loop (between steps 3 and 4).

A request whose grammar is not compiled yet waits here and not in the engine's queue; it comes back
through the link's inbox. So a huge grammar delays nobody's step, and it is the engine thread that
answers, as for every request.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue

from jaxserve import messages
from jaxserve.engine.link import Compiled, Received
from jaxserve.errors import RequestError
from jaxserve.structured.matcher import Grammars

logger = logging.getLogger("jaxserve.engine")

_THREADS = 2


class GrammarCompiler:
    """One engine's. Methods are called by the engine thread. grammars: None where there are none."""

    def __init__(self, grammars: Grammars | None, inbox: queue.SimpleQueue[Received]) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._waiting: set[tuple[bytes, int]] = set()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix="grammar-compiler"
        )

    def takes(self, worker: bytes, message: messages.Submit) -> bool:
        """Whether the request waits for its grammar; False if it can be added now."""
        grammar = message.request.grammar
        if grammar is None or self._grammars is None or self._grammars.ready(grammar):
            return False
        self._waiting.add((worker, message.rid))
        self._pool.submit(self._compile, worker, message)
        return True

    def gives_back(self, worker: bytes, message: messages.Submit) -> bool:
        """Whether the request, back from waiting, is still wanted."""
        wanted = (worker, message.rid) in self._waiting
        self._waiting.discard((worker, message.rid))
        return wanted

    def drop(self, worker: bytes, rid: int | None = None) -> None:
        """A request, or every one of a worker, is not wanted any more."""
        self._waiting = {
            key for key in self._waiting if key[0] != worker or rid not in (None, key[1])
        }

    def _compile(self, worker: bytes, message: messages.Submit) -> None:
        grammar = message.request.grammar
        assert grammar is not None
        assert self._grammars is not None
        try:
            if (worker, message.rid) in self._waiting:
                self._grammars.matcher(grammar)
        except RequestError:
            logger.debug("a grammar cannot be compiled")  # the engine will say so to its request
        except Exception:
            logger.exception("compiling a grammar failed")
        self._inbox.put((worker, Compiled(message)))
