"""Engines over rows that a database reads block by block: exact, certified and by block sums."""
