"""Helpers that everything else uses: formatting, progress bars, display, registries, types."""
