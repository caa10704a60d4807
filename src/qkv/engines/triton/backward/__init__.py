"""Kernels of the gradients, and the functions that launch them."""
