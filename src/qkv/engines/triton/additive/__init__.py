"""Kernels of the additive score: exact, by features, and the projections of its hidden units."""
