"""Pictures of attention weights. matplotlib is loaded when the first one is drawn."""

from qkv.plot.bars import bars
from qkv.plot.heatmaps import heatmaps

__all__ = ["bars", "heatmaps"]
