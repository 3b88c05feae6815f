"""Step 6 of the walk: one decoder for all families, and how files become its parameters."""
