"""How much one grammar may ask for: text, work and memory (part of step 3)."""

from __future__ import annotations

from llguidance import LLParserLimits

#: Bytes of a schema, expression or grammar as its request wrote it.
MAX_SOURCE_BYTES = 128 * 1024
#: Texts of one `choice`.
MAX_CHOICES = 5_000
#: Bytes of what is made of all of a request's tools together.
MAX_GRAMMAR_BYTES = 512 * 1024
#: Seconds which one answer's masks may take beyond what they usually take (`USUAL_SECONDS` each).
MAX_EXTRA_SECONDS = 1.0
USUAL_SECONDS = 0.01


def parser_limits() -> LLParserLimits:
    """Bounds of llguidance's work: tens of milliseconds for a mask, some hundred for the first.

    Ordinary schemas need a hundredth of them. Fuel is about 50,000 a millisecond for
    the first mask and 14,000 for later ones; a lexer state takes one or two kilobytes.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_items_in_row=1_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
