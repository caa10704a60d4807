"""Kernels are compiled, launched and replayed here, and registered as PyTorch operators."""
