"""Device functions and records that several kernels share."""
