"""Filters (`where`): expressions, and the comparisons of columns in them."""
