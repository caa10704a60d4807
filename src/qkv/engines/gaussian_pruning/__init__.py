"""Gaussian attention on a CPU that skips boxes of keys whose weights cannot count."""
