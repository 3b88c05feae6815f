"""Weights and tokenisers in and out: safetensors, GGUF, Orbax, and models that can be pulled.

Knows files, not models. Only `checkpoints.orbax_reader`, what writes
Orbax, and what trained the small model (`small_*`, `train_small`) import jax.
"""
