"""Databases over HTTP: `qkv serve books.qkv`, an API and the page beside it."""
