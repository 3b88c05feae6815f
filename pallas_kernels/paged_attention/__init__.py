"""Ragged attention over a paged KV cache (step 6b of the walk)."""
