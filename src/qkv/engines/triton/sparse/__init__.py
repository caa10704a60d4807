"""Kernels of sparse weightings: thresholds of rows, and lists of the keys that get weight."""
