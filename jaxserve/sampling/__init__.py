"""Choosing tokens inside the step (step 7): per-slot state, per-row arrays, adjustments, the draw.

`limits.py` imports no jax, so that the front end may use it.
"""
