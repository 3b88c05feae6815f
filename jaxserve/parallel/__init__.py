"""Meshes and shardings: which axis of an array is split over which devices (used by step 6)."""
