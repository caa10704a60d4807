"""Plots of attention. Each function returns a figure; the function of the same name in
`qkv.plot.data` returns the numbers. matplotlib is imported when the first figure is drawn.
"""

from qkv.plot import data
from qkv.plot.bar_plots import bars
from qkv.plot.heatmap_plots import entropy, heads, heatmaps
from qkv.plot.link_plots import alignment, flow
from qkv.plot.score_plots import kernels, regression, surfaces

__all__ = [
    "alignment",
    "bars",
    "data",
    "entropy",
    "flow",
    "heads",
    "heatmaps",
    "kernels",
    "regression",
    "surfaces",
]
