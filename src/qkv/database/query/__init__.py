"""Queries of a database: arguments, execution, calibration, and the influence of rows."""
