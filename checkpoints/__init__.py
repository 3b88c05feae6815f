"""Weights and tokenisers in and out: safetensors, GGUF, Orbax, and models that can be pulled.

Knows files, not models. Only `checkpoints.orbax_reader` and what writes Orbax import jax.
"""
