"""Products with quantised weights: int8, int4 and fp8, weight-only or with rounded activations (step 6)."""
