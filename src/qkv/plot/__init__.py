"""Pictures of attention. Each returns a figure, and has a twin in `qkv.plot.data` that returns the
numbers. matplotlib is loaded when the first one is drawn.
"""

from qkv.plot import data
from qkv.plot.bars import bars
from qkv.plot.heatmaps import entropy, heads, heatmaps
from qkv.plot.kernels import kernels, regression, surfaces
from qkv.plot.links import alignment, flow

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
