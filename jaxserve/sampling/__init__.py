"""Choosing tokens inside the step (step 7): per-slot state, per-row arrays, adjustments, the draw.

`seeds.py` and `limits.py` import no jax, so that the front end may use them.
"""
