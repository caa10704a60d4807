"""How kernels are compiled, launched and replayed, and how PyTorch sees them."""
