"""What a model needs on accelerators that are not here (before step 1).

`jaxserve plan` compiles the engine's own step for a slice of TPUs or for GPUs, from shapes alone,
and tells where the memory goes and how fast a step can be at best. Two processes: the command line
(`launch`, `report`, `chips`: no jax) and its child, which compiles (`child`, `measure`), started
with the environment that jax and libtpu read when they are loaded. `fit` and `bound` are the
arithmetic between them.
"""
