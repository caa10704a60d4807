"""Filters (`where`): expressions, comparisons and the columns they read."""
