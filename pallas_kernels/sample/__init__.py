"""Choosing tokens from logits (step 7): temperature, min-p, top-k, top-p, seeded noise, log-probabilities.

`reference.py` is the definition (it sorts), `xla.py` the exact form without a sort, `api.py` what
the rest of the project calls. Knows nothing of requests, slots or penalties.
"""
