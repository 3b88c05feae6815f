"""Step 6 of the walk, in parts: the layers that every model is made of.

Layers know nothing of families, files, pages' owners or requests.
"""
