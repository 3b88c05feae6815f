"""A few rows times a float32 matrix, at the speed of reading the matrix (step 6)."""
