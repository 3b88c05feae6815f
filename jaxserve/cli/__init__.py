"""The command line, above everything else: one module per verb, joined in `main`.

Nothing here imports jax, flax or a model at the top of a module: `jaxserve --help` is instant and
`jaxserve serve` stays a light parent of its processes.
"""
