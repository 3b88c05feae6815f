"""How weights are stored and multiplied when they are not plain floats (before step 1, and step 6)."""
