"""Measures speed (beside the walk): `serve` a running server, from outside; the rest this process.

`bench/serving/` is a client of any OpenAI-compatible server and imports neither jax nor the engine.
"""
