"""Tries a grammar in the front end, so that a bad one is refused before any token (step 1)."""

from __future__ import annotations

import collections
import re
import threading

from llguidance import LLMatcher

from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured.limits import MAX_GRAMMAR_BYTES, parser_limits
from jaxserve.structured.vocabulary import make_byte_vocabulary
from jaxserve.tokenizer.protocol import Tokenizer

_REMEMBERED = 256
_SHOWN = 300


class GrammarChecker:
    """Compiles grammars as the engine will, with a small vocabulary. Thread-safe.

    Remembers the last ones that passed: agents send the same schema with every request.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._lock = threading.Lock()
        self._vocabulary = make_byte_vocabulary(tokenizer)
        self._passed: collections.OrderedDict[str, None] = collections.OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether `check` would return at once."""
        return grammar.text in self._passed

    def check(self, grammar: Grammar) -> None:
        """Raises RequestError naming the field where the grammar cannot be enforced.

        May take some hundred milliseconds for a hostile one, most of them without
        the interpreter's lock.
        """
        if self.knows(grammar):
            return
        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            raise _refused(grammar, f"it makes a grammar of {len(grammar.text)} bytes")
        matcher = LLMatcher(self._vocabulary, grammar.text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(grammar, _one_line(matcher.get_error()))
        with self._lock:
            self._passed[grammar.text] = None
            while len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)


def _refused(grammar: Grammar, why: str) -> RequestError:
    return RequestError(f"{grammar.param}: {why}", param=grammar.param, code="invalid_grammar")


def _one_line(text: str) -> str:
    """llguidance's complaint without the picture of the place and what it did not say."""
    text = re.split(r"\n\s*\d+ \| |\n<non-verbose", text)[0]
    text = text.replace("NoExtensionBias", "no text satisfies it")
    return " ".join(text.split())[:_SHOWN]
