"""Databases over HTTP: `qkv serve books.qkv` serves an API and the page."""
