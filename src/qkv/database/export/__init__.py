"""Rows as frames, files and pictures."""
