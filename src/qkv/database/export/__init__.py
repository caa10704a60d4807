"""Export of rows to data frames, files, HTML and heatmaps."""
