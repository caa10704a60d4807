"""Kernels of the weighted sum, and the functions that launch them."""
