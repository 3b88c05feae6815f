"""The host's view of the KV cache: who owns which page, and which pages can be shared (step 5).

Knows page ids and hashes only; the pages themselves live on the device and belong to the
engine's runner. Imports neither jax nor the engine.
"""
