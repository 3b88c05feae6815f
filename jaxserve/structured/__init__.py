"""Answers of a given form (between steps 1 and 7): grammars, checked in front, enforced in the engine.

The front end writes a `jaxserve.request.Grammar` (`grammars`, `json_schema`) and tries it
(`check`), so that a bad one is refused before any token. The engine compiles it (`matcher`) and
gets, after each token, the bit mask of those that may follow. llguidance does the parsing. Nothing
in here imports jax or knows HTTP.
"""
