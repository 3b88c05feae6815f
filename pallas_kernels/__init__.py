"""The ops: one folder each, with its definition, its implementations and its cases (step 6b).

Knows nothing of jaxserve: arrays in, arrays out.
"""
