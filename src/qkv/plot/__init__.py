"""Pictures of attention. Each returns a figure, and has a twin in `qkv.plot.data` that returns the
numbers. matplotlib is loaded when the first one is drawn.
"""

from qkv.plot import data
from qkv.plot.bars import bars
from qkv.plot.heads import entropy, heads
from qkv.plot.heatmaps import heatmaps
from qkv.plot.kernels import kernels, surfaces
from qkv.plot.links import alignment, flow
from qkv.plot.regression import regression

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
