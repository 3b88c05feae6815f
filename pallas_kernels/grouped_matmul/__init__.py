"""Each row times the matrix of its group: experts of a mixture (step 6)."""
