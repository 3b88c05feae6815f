"""How far a way of storing weights moves a model's answers (before step 1): `jaxserve quality`.

Runs the whole engine, as a user would get it, and compares what it says with float32.
"""
