"""Queries: arguments, execution, calibration and influence."""
